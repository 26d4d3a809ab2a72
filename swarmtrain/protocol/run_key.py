"""The key of a run: a random secret with which the run's processes authenticate to each other where others can reach its ports.

Standard library only: the entrypoint imports this in images whose other packages may be broken.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import ENV_KEY_FILE

REQUEST_PURPOSE, RESPONSE_PURPOSE = "request", "response"
"""Purposes of signed messages to and from the coordinator."""
NEXT_NONCE_FIELD = "next_nonce"
"""Field of a signed response: the nonce of the client's next request."""
MAX_FIRST_REQUEST_BYTES = 4096
"""Maximum bytes of the first line of a connection. A longer request follows an empty one, which shows that the client has the key."""
_KEY_BYTES, _NONCE_BYTES = 32, 16


def create_run_key() -> bytes:
    """Return a new random key, as hexadecimal digits."""
    return secrets.token_hex(_KEY_BYTES).encode()


def load_run_key(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of the run whose environment variables are `environ`; empty if the run has no key.

    Raises CoordinatorError if the key cannot be read.
    """
    path = environ.get(ENV_KEY_FILE, "")
    return _read_key(path) if path else b""


@cache
def _read_key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise CoordinatorError(error.strerror or str(error), place=f"the run's key {path}") from None
    if len(key) != 2 * _KEY_BYTES:
        raise CoordinatorError(f"has {len(key)} characters, not {2 * _KEY_BYTES}", place=f"the run's key {path}")
    return key


class SignedMessage(NamedTuple):
    """Body of a message whose signature was checked, and the nonce for which it was signed."""

    body: bytes
    nonce: str


def build_signed_message(key: bytes, purpose: str, nonce: str, body: str) -> bytes:
    """Return one line: the signature, `nonce` and `body`, separated by spaces.

    The signature is a keyed BLAKE2b hash (a MAC, RFC 7693), valid for this `purpose` and `nonce` only. If the receiver accepts a nonce
    once, a recorded message cannot be replayed.
    """
    content = body.encode()
    return b"%s %s %s\n" % (_compute_signature(key, purpose, nonce.encode(), content), nonce.encode(), content)


def open_signed_message(key: bytes, purpose: str, line: bytes) -> SignedMessage | None:
    """Return the message in `line`; None if it is not signed with `key` for this `purpose`."""
    fields = line.rstrip(b"\n").split(b" ", 2)
    if len(fields) != 3 or not fields[1].isascii():
        return None
    signature, nonce, body = fields
    # A comparison whose duration does not depend on the first difference.
    is_valid = hmac.compare_digest(signature, _compute_signature(key, purpose, nonce, body))
    return SignedMessage(body, nonce.decode()) if is_valid else None


def _compute_signature(key: bytes, purpose: str, nonce: bytes, body: bytes) -> bytes:
    # hashlib's HMAC uses OpenSSL, which first initializes itself in each thread: in a server with a thread per request, that takes longer.
    return hashlib.blake2b(b"%s\n%s\n%s" % (purpose.encode(), nonce, body), key=key, digest_size=32).hexdigest().encode()


class IssuedNonces:
    """The nonces that a server has issued and that no request has used yet. Can be used by several threads."""

    def __init__(self, max_count: int = 100_000) -> None:
        """Keep the newest `max_count` nonces."""
        self._prefix, self._max_count = secrets.token_hex(_NONCE_BYTES), max_count
        # Only the prefix is random: a nonce must be unique, not secret. New random bytes would cost 10 µs in each thread of the server.
        self._numbers = itertools.count()
        self._unused: dict[str, None] = {}
        self._lock = threading.Lock()

    def issue_nonce(self) -> str:
        """Return a new nonce."""
        with self._lock:
            nonce = f"{self._prefix}-{next(self._numbers)}"
            self._unused[nonce] = None
            if len(self._unused) > self._max_count:
                del self._unused[next(iter(self._unused))]
        return nonce

    def use_nonce(self, nonce: str) -> bool:
        """Mark `nonce` as used. Return whether it was issued and is unused."""
        with self._lock:
            return self._unused.pop(nonce, self) is None

    def has_issued_nonce(self, nonce: str) -> bool:
        """Return whether this server has issued `nonce`, used or not, and not an earlier one."""
        return nonce.startswith(f"{self._prefix}-")
