"""Identity of a run: the id that it gets when it is first brought up, its owner, and the machine from which it was deployed.

Run names can be reused, so records of a run are found by its id. The identity is stored in labels, or in the run's record on its hosts.
Standard library only: the process keeper of a Slurm job imports this.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from swarmtrain.protocol import LABEL_CREATED, LABEL_ORIGIN, LABEL_OWNER, LABEL_RUN_ID

OWNER_VARIABLE = "SWARMTRAIN_OWNER"
"""Environment variable with the name of the person who deploys, for accounts that several people share. Default: the user name."""
ID_LENGTH = 12
_UNKNOWN_USER = "unknown"
# Names and ids in labels become paths of records, and anyone who can create a service can set its labels.
_ID_PATTERN = re.compile(r"[0-9A-Za-z-]{1,64}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SECONDS_PATTERN = re.compile(r"[0-9]{1,11}")


@dataclass(frozen=True)
class RunIdentity:
    """Identity of one run. A run that was started without swarmtrain, with `docker stack deploy` or sbatch, has no owner."""

    id: str
    owner: str = ""
    """Name of the person who brought the run up; empty if it is unknown."""
    origin: str = ""
    """Host name of the machine from which the run was brought up; only for display. Empty if it is unknown."""
    created: float = 0.0
    """Time at which the run was brought up, in seconds since the epoch; 0 if it is unknown."""

    @property
    def labels(self) -> dict[str, str]:
        """The labels that store this identity."""
        return {LABEL_RUN_ID: self.id, LABEL_OWNER: self.owner, LABEL_ORIGIN: self.origin, LABEL_CREATED: f"{self.created:.0f}"}

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> RunIdentity | None:
        """Return the identity that `labels` store; None if they store none, or an invalid id."""
        run_id, created = labels.get(LABEL_RUN_ID, ""), labels.get(LABEL_CREATED, "")
        if not _ID_PATTERN.fullmatch(run_id):
            return None
        seconds = float(created) if _SECONDS_PATTERN.fullmatch(created) else 0.0
        return cls(run_id, labels.get(LABEL_OWNER, ""), labels.get(LABEL_ORIGIN, ""), seconds)

    @classmethod
    def from_engine_object(cls, object_id: str, created: str) -> RunIdentity:
        """Return the identity of a run that plain Docker started: without owner, and with the id of its coordinator's service or container.

        `created`: time of its creation in Docker's format, such as 2026-11-26T01:02:03.123456789Z.
        """
        return cls(object_id[:ID_LENGTH], created=_parse_engine_time(created))

    @property
    def is_own(self) -> bool:
        """Whether the current user brought the run up, or nobody knows who did."""
        return self.owner in ("", find_current_owner())

    @property
    def owner_text(self) -> str:
        """The owner, with the machine from which the run was deployed: "alice from login1"; empty if the owner is unknown."""
        return f"{self.owner} from {self.origin}" if self.owner and self.origin else self.owner

    def __str__(self) -> str:
        start = time.strftime("deployed on %Y-%m-%d at %H:%M", time.localtime(self.created)) if self.created else ""
        return ", ".join(filter(None, (f"id {self.id}", f"owner {self.owner_text}" if self.owner else "", start)))


def is_valid_run_name(name: str) -> bool:
    """Return whether the name of a run, or of a stack that plain Docker has deployed, can be the name of its folder."""
    return bool(_NAME_PATTERN.fullmatch(name))


def create_run_identity() -> RunIdentity:
    """Return the identity of a new run of the current user, with a random id."""
    return RunIdentity(secrets.token_hex(ID_LENGTH // 2), find_current_owner(), socket.gethostname(), float(int(time.time())))


def find_current_owner() -> str:
    """Return the name of the current user as an owner of runs: SWARMTRAIN_OWNER, else the user name."""
    try:
        return os.environ.get(OWNER_VARIABLE) or getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return _UNKNOWN_USER


def _parse_engine_time(text: str) -> float:
    try:
        return float(int(datetime.fromisoformat(text).timestamp()))
    except ValueError:
        return 0.0
