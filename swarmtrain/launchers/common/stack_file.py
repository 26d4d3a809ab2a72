"""The files that `swarmtrain generate` writes for Docker: a stack file, or a Compose file."""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.launchers.base import Launcher
from swarmtrain.planning.plan import Plan
from swarmtrain.render.stack_document import Stack, render_stack, write_stack

STDOUT_PATH = Path("-")
"""Path that stands for standard output."""


def write_deployment_text(launcher_class: type[Launcher], plan: Plan) -> tuple[str, str]:
    """Return the deployment file of `plan` as text, and text for the user. The files that it needs are written below the working folder.

    Raises SwarmtrainError if they cannot be written.
    """
    temporary = Path(f".swarmtrain-{os.getpid()}.yml")  # in the working folder, because paths in a stack file are relative to it
    try:
        message = launcher_class.write_deployment_file(plan, temporary)
        written = next(Path().glob(f"{temporary.stem}.*"))  # a launcher may choose the suffix
        return written.read_text(encoding="utf-8"), message.replace(str(written), str(STDOUT_PATH))
    finally:
        for path in Path().glob(f"{temporary.stem}.*"):
            path.unlink()


def write_stack_file(plan: Plan, output: Path) -> str:
    """Write the stack file of `plan` to `output`. Return text for the user, with the command that deploys it."""
    return write_stack_or_compose_file(plan, render_stack(plan), output)


def write_stack_or_compose_file(plan: Plan, stack: Stack, output: Path) -> str:
    """Write `stack`, rendered from `plan`, to `output`. Return text for the user, with the command that deploys it."""
    write_stack(stack, output)
    return "\n".join([f"wrote {output}", *plan.notes, f"next: {stack.command_template.format(file=output, name=stack.name)}"])
