"""Access policy of the dashboard: clients must send a token, except on loopback without a token file."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import SwarmtrainError

_MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class AccessPolicy:
    """Decide which requests may access the dashboard: those with `token`; all if `token` is empty.

    With `loopback_only`, the Host header of a request must be a loopback name or address.
    """

    token: str
    loopback_only: bool
    port: int

    @property
    def cookie_name(self) -> str:
        """Name of the cookie with the token. It contains the port, since browsers share cookies between the ports of a host."""
        return f"swarmtrain-{self.port}"

    def is_allowed_host(self, host: str) -> bool:
        """Return whether the Host header `host` is allowed: with `loopback_only`, only a loopback name or address.

        Any other name then belongs to a website whose DNS record points to this machine (DNS rebinding).
        """
        if not self.loopback_only:
            return True
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return is_loopback(name.strip("[]"))

    def has_access(self, cookies: Mapping[str, str], authorization: str) -> bool:
        """Return whether `cookies` or the Authorization header `authorization` contains the token; True if `token` is empty."""
        if not self.token:
            return True
        scheme, _, bearer = authorization.partition(" ")
        return self.is_valid_token(cookies.get(self.cookie_name, "")) or (
            scheme.lower() == "bearer" and self.is_valid_token(bearer.strip())
        )

    def is_valid_token(self, token: str) -> bool:
        """Return whether `token` is the dashboard's token, with a constant-time comparison."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())


def create_access_policy(host: str, port: int, token_file: Path | None) -> AccessPolicy:
    """Return the access policy of a dashboard at `host`: with the token in `token_file`, or a new random token unless `host` is loopback.

    Raises SwarmtrainError if `token_file` cannot be read, or its token is invalid.
    """
    loopback = is_loopback(host)
    token = _read_token(token_file) if token_file else "" if loopback else secrets.token_urlsafe(24)
    return AccessPolicy(token, loopback, port)


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_token(path: Path) -> str:
    try:
        token = read_regular_file(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(
            f"cannot be read: {reason}", place=f"--token-file {path}", hint="write the token into it, on a single line"
        ) from None
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        hint = "create one with openssl rand -hex 24 > FILE"
        raise SwarmtrainError(
            f"must contain a token of at least {_MIN_TOKEN_LENGTH} letters and digits", place=f"--token-file {path}", hint=hint
        )
    return token
