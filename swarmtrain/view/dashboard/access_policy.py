"""Who may see the page: on loopback every user of this machine, elsewhere clients that have the token."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from swarmtrain.errors import SwarmtrainError

_MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class AccessPolicy:
    """The conditions for access. If `token` is empty, none is needed. With `loopback_only`, the host must be a name of this machine."""

    token: str
    loopback_only: bool
    port: int

    @property
    def cookie_name(self) -> str:
        """The cookie's name, with the port: browsers share cookies between the ports of a host."""
        return f"swarmtrain-{self.port}"

    def is_allowed_host(self, host: str) -> bool:
        """Return whether the Host header is a name of the page.

        On loopback, another name is that of a web site whose DNS entry was made to point to this machine (DNS rebinding).
        """
        if not self.loopback_only:
            return True
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return is_loopback(name.strip("[]"))

    def has_access(self, cookies: Mapping[str, str], authorization: str) -> bool:
        """Return whether a request with these cookies and this Authorization header has the token, or needs none."""
        if not self.token:
            return True
        scheme, _, bearer = authorization.partition(" ")
        return self.is_token(cookies.get(self.cookie_name, "")) or (scheme.lower() == "bearer" and self.is_token(bearer.strip()))

    def is_token(self, token: str) -> bool:
        """Return whether `token` is the right one, compared in constant time."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())


def create_access_policy(host: str, port: int, token_file: Path | None) -> AccessPolicy:
    """Return the access policy of a page at `host`: with the token in `token_file` or, off loopback, a new random one.

    Raises SwarmtrainError.
    """
    loopback = is_loopback(host)
    token = _read_token(token_file) if token_file else "" if loopback else secrets.token_urlsafe(24)
    return AccessPolicy(token, loopback, port)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback one."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(f"cannot be read: {reason}", place=f"--token-file {path}", hint="put the token into it, one line") from None
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        hint = "openssl rand -hex 24 > FILE makes one"
        raise SwarmtrainError(f"its token must be at least {_MIN_TOKEN_LENGTH} letters and digits", place=f"--token-file {path}", hint=hint)
    return token
