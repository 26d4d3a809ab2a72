"""Who may use the registry in the swarm, and for what: its login, and whether it accepts requests that delete images.

The registry reads its user from an htpasswd file, a Swarm secret, in which it accepts only bcrypt hashes. The package bcrypt computes them;
it belongs to the extra `registry`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from swarmtrain.errors import ImageError

USER_LABEL = "swarmtrain.registry.user"
SALT_LABEL = "swarmtrain.registry.salt"
DELETES_LABEL = "swarmtrain.registry.deletes"
HTPASSWD_LABEL = "swarmtrain.registry.htpasswd"
_HTPASSWD_FILE = "htpasswd"
_BCRYPT_COST = 10
_MAX_PASSWORD_BYTES = 72  # bcrypt accepts no more
_USER_PATTERN = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_SALT_PATTERN = re.compile(r"\$2b\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{21}[.Oeu]")


@dataclass(frozen=True)
class RegistryAccess:
    """Who may use a registry. `user` is empty if it has no login."""

    user: str = ""
    password: str = ""
    """Empty: the password of the running registry is kept."""
    allow_deletes: bool = False

    def __post_init__(self) -> None:
        """Raises ImageError if user or password cannot be written to an htpasswd file, or the password is too long for bcrypt."""
        if self.user and not _USER_PATTERN.fullmatch(self.user):
            raise ImageError(f"{self.user!r} is not a valid user: use letters, digits, and . _ @ -", place="registry login")
        if len(self.password.encode()) > _MAX_PASSWORD_BYTES or not self.password.isprintable():
            raise ImageError(f"must be one line of at most {_MAX_PASSWORD_BYTES} bytes", place="password of the registry")

    @property
    def environment(self) -> list[str]:
        """The settings of the registry's container, in its own environment variables."""
        settings = [f"REGISTRY_STORAGE_DELETE_ENABLED={str(self.allow_deletes).lower()}"]
        if self.user:
            settings += ["REGISTRY_AUTH=htpasswd", "REGISTRY_AUTH_HTPASSWD_REALM=swarmtrain"]
            settings.append(f"REGISTRY_AUTH_HTPASSWD_PATH=/run/secrets/{_HTPASSWD_FILE}")
        return settings

    def build_htpasswd(self, labels: Mapping[str, str]) -> HtpasswdFile:
        """Return the htpasswd file, with the salt in the `labels` of the running registry if that has the same user.

        Raises ImageError if the package bcrypt is missing.
        """
        try:
            import bcrypt
        except ImportError:
            raise ImageError(
                "needs the package bcrypt, which hashes the password",
                place="registry login",
                hint="pip install 'swarmtrain[registry]'; or --no-login, with which anyone who reaches the port can replace images",
            ) from None
        salt = labels.get(SALT_LABEL, "") if labels.get(USER_LABEL) == self.user else ""
        if not _SALT_PATTERN.fullmatch(salt):
            salt = bcrypt.gensalt(_BCRYPT_COST).decode()
        return HtpasswdFile(salt, f"{self.user}:{bcrypt.hashpw(self.password.encode(), salt.encode()).decode()}\n".encode())

    def describe_changes(self, labels: Mapping[str, str], secret_name: str) -> list[str]:
        """Return how this access differs from that of the running registry with these service `labels` and htpasswd secret."""
        old_user, old_deletes = labels.get(USER_LABEL, ""), labels.get(DELETES_LABEL, "true") == "true"
        changes = [] if self.user == old_user else [f"login: {_describe_login(old_user)} → {_describe_login(self.user)}"]
        if self.user == old_user and self.password and self.build_htpasswd(labels).digest not in secret_name:
            changes.append(f"login: another password for user {self.user}")
        if self.allow_deletes != old_deletes:
            changes.append(f"requests that delete images: {_describe_deletes(old_deletes)} → {_describe_deletes(self.allow_deletes)}")
        return changes


@dataclass(frozen=True)
class HtpasswdFile:
    """An htpasswd file with one user."""

    salt: str
    content: bytes

    @property
    def digest(self) -> str:
        """Digest of the content, for the name of the Swarm secret, which cannot be changed."""
        return hashlib.sha256(self.content).hexdigest()[:10]


def build_secret_mount(secret_id: str, secret_name: str) -> dict[str, object]:
    """Return the entry in a service's spec that mounts the htpasswd secret."""
    return {
        "SecretID": secret_id,
        "SecretName": secret_name,
        "File": {"Name": _HTPASSWD_FILE, "UID": "0", "GID": "0", "Mode": 0o444},
    }


def _describe_login(user: str) -> str:
    return f"user {user}" if user else "none"


def _describe_deletes(are_allowed: bool) -> str:
    return "allowed" if are_allowed else "refused"
