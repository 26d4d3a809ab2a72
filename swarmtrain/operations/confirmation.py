"""Ask the user before a change that interrupts a run, or that concerns somebody else's run."""

from __future__ import annotations

from swarmtrain.errors import ConfirmationRequired, RunNotFound, StackError
from swarmtrain.launchers.base import Launcher
from swarmtrain.view.console import ask_confirmation


def confirm_change(launcher: Launcher, run: str, action: str, *, must_ask: bool = False, assume_yes: bool) -> None:
    """Ask the user to confirm `action`, a verb phrase that the run's name follows, if the run is somebody else's, or if `must_ask`.

    Raises ConfirmationRequired if there is no terminal, StackError if the user declines.
    """
    try:
        identity = launcher.read_identity(run)
    except RunNotFound:  # only parts of the run are left, which do not show whose they are
        return
    if assume_yes or (identity.is_own and not must_ask):
        return
    owner = "" if identity.is_own else f", the run of {identity.owner_text}"
    confirmed = ask_confirmation(f"{action} {run}{owner}?")
    if confirmed is None:
        raise ConfirmationRequired(
            f"this would {action} {run}{owner}, but there is no terminal to confirm it", place=f"run {run}", hint="add --yes to confirm"
        )
    if not confirmed:
        raise StackError("was left unchanged: the change was not confirmed", place=f"run {run}")
