"""Certificates of a test authority, made with openssl: for a client, and for a server at an address."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def create_authority(folder: Path) -> None:
    """Create the authority: write ca.pem and its key to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _run_openssl(folder, "req", "-x509", *_KEY, "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")


def sign_certificate(folder: Path, *, cert: str, key: str, address: str | None = None) -> None:
    """Write `cert` and `key` into the authority's `folder`: for a client, or for the server at the IP `address`."""
    request, names = f"{cert}.csr", folder / f"{cert}.ext"
    names.write_text(f"subjectAltName=IP:{address}\nextendedKeyUsage=serverAuth\n" if address else "extendedKeyUsage=clientAuth\n")
    _run_openssl(folder, "req", *_KEY, "-keyout", key, "-out", request, "-subj", "/CN=test")
    signing_options = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2"]
    _run_openssl(folder, "x509", "-req", "-in", request, *signing_options, "-extfile", names.name, "-out", cert)


def _run_openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
