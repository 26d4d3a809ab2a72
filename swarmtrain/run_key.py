"""The key of a run: a random secret with which the run's processes authenticate to each other where others can reach its ports.

Standard library only: the entrypoint imports this in images whose other packages may be broken.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import ENV_KEY_FILE

REQUEST_PURPOSE, RESPONSE_PURPOSE = "request", "response"
"""Purposes of signed messages to and from the coordinator."""
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
    if not key:
        raise CoordinatorError("the file is empty", place=f"the run's key {path}")
    return key


@dataclass(frozen=True)
class SignedMessage:
    """Body of a message whose signature was checked, and the nonce for which it was signed."""

    body: str
    nonce: str


def build_signed_message(key: bytes, purpose: str, nonce: str, body: str) -> bytes:
    """Return `body`, `nonce` and their signature as one line of JSON.

    The signature is an HMAC-SHA256 (RFC 2104), valid for this `purpose` and `nonce` only. If the receiver accepts a nonce once, a recorded
    message cannot be replayed.
    """
    return json.dumps({"body": body, "nonce": nonce, "signature": _compute_signature(key, purpose, nonce, body)}).encode() + b"\n"


def open_signed_message(key: bytes, purpose: str, line: bytes) -> SignedMessage | None:
    """Return the message in `line`; None if it is not signed with `key` for this `purpose`."""
    try:
        fields = json.loads(line)
        body, nonce, signature = fields["body"], fields["nonce"], fields["signature"]
    except (ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(field, str) for field in (body, nonce, signature)):
        return None
    # A comparison whose duration does not depend on the first difference.
    is_valid = hmac.compare_digest(signature.encode(), _compute_signature(key, purpose, nonce, body).encode())
    return SignedMessage(body, nonce) if is_valid else None


def _compute_signature(key: bytes, purpose: str, nonce: str, body: str) -> str:
    return hmac.new(key, f"{purpose}\n{nonce}\n{body}".encode(), hashlib.sha256).hexdigest()


class IssuedNonces:
    """The nonces that a server has issued and that no request has used yet. Can be used by several threads."""

    def __init__(self, max_count: int = 100_000) -> None:
        """Keep the newest `max_count` nonces."""
        self._prefix, self._max_count = secrets.token_hex(8), max_count
        self._unused: dict[str, None] = {}
        self._lock = threading.Lock()

    def issue_nonce(self) -> str:
        """Return a new nonce."""
        nonce = f"{self._prefix}-{secrets.token_hex(_NONCE_BYTES)}"
        with self._lock:
            self._unused[nonce] = None
            if len(self._unused) > self._max_count:
                del self._unused[next(iter(self._unused))]
        return nonce

    def use_nonce(self, nonce: str) -> bool:
        """Mark `nonce` as used. Return whether it was issued and is unused."""
        with self._lock:
            return self._unused.pop(nonce, self) is None

    def has_issued(self, nonce: str) -> bool:
        """Return whether this server has issued `nonce`, used or not, and not an earlier one."""
        return nonce.startswith(f"{self._prefix}-")
