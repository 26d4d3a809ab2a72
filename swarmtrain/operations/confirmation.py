"""Ask the user before a change that interrupts a run, concerns somebody else's run, or replaces a registry that others use."""

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
    if must_ask or not identity.is_own:
        owner = "" if identity.is_own else f", the run of {identity.owner_text}"
        require_confirmation(f"{action} {run}{owner}", f"run {run}", assume_yes=assume_yes)


def require_confirmation(action: str, place: str, *, assume_yes: bool) -> None:
    """Ask the user to confirm `action`, a verb phrase, unless `assume_yes`. `place` is what it changes, for errors.

    Raises ConfirmationRequired if there is no terminal, StackError if the user declines.
    """
    confirmed = assume_yes or ask_confirmation(f"{action}?")
    if confirmed is None:
        raise ConfirmationRequired(f"this would {action}, but there is no terminal to confirm it", place=place, hint="add --yes to confirm")
    if not confirmed:
        raise StackError("was left unchanged: the change was not confirmed", place=place)
