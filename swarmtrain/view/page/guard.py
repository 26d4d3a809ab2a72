"""Who may see the page: on loopback whoever is on this machine, elsewhere who has the token."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from swarmtrain.errors import SwarmtrainError

_LEAST = 16


@dataclass(frozen=True)
class Guard:
    """What lets a request in. `token` empty: none is needed. `loopback`: only a name of this machine is taken for its host."""

    token: str
    loopback: bool
    port: int

    @property
    def cookie(self) -> str:
        """The cookie's name; browsers share cookies between the ports of a host."""
        return f"swarmtrain-{self.port}"

    def knows(self, host: str) -> bool:
        """Say whether the Host header is one that the page goes by: another one on loopback is a web site's that was made to lead here."""
        if not self.loopback:
            return True
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return is_loopback(name.strip("[]"))

    def admits(self, cookies: Mapping[str, str], authorization: str) -> bool:
        """Say whether a request with these cookies and this Authorization header has the token, or needs none."""
        if not self.token:
            return True
        scheme, _, bearer = authorization.partition(" ")
        return self.fits(cookies.get(self.cookie, "")) or (scheme.lower() == "bearer" and self.fits(bearer.strip()))

    def fits(self, token: str) -> bool:
        """Compare with the token, in a time that tells nothing of it."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())


def guard(host: str, port: int, token_file: Path | None) -> Guard:
    """Return the guard of a page at `host`: with the token of a file, or, off loopback, one that is drawn now. Raises SwarmtrainError."""
    here = is_loopback(host)
    token = _read(token_file) if token_file else "" if here else secrets.token_urlsafe(24)
    return Guard(token, here, port)


def is_loopback(host: str) -> bool:
    """Say whether a name or an address is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(f"cannot be read: {reason}", place=f"--token-file {file}", hint="put the token into it, one line") from None
    if len(token) < _LEAST or not token.isascii() or not token.isprintable() or " " in token:
        hint = "openssl rand -hex 24 > FILE makes one"
        raise SwarmtrainError(f"its token must be at least {_LEAST} letters and digits", place=f"--token-file {file}", hint=hint)
    return token
