"""Certificates of an authority of our own, made by openssl: one for a client, one for a server at an address."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def authority(folder: Path) -> None:
    """Write ca.pem, and its key beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(folder, "req", "-x509", *_KEY, "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")


def sign(folder: Path, *, cert: str, key: str, address: str | None = None) -> None:
    """Write `cert` and `key` into the authority's `folder`: a client's, or those of the server at an IP `address`."""
    request, names = f"{cert}.csr", folder / f"{cert}.ext"
    names.write_text(f"subjectAltName=IP:{address}\nextendedKeyUsage=serverAuth\n" if address else "extendedKeyUsage=clientAuth\n")
    _openssl(folder, "req", *_KEY, "-keyout", key, "-out", request, "-subj", "/CN=test")
    signed = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2"]
    _openssl(folder, "x509", "-req", "-in", request, *signed, "-extfile", names.name, "-out", cert)


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
