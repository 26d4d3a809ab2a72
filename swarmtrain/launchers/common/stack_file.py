"""The files that `swarmtrain generate` writes for Docker: a stack file, or a Compose file."""

from __future__ import annotations

from pathlib import Path

from swarmtrain.plan import Plan
from swarmtrain.render.stack_document import Stack, render_stack, write_stack


def write_stack_file(plan: Plan, output: Path) -> str:
    """Write the stack file of `plan` to `output`. Return text for the user, with the command that deploys it."""
    return write_stack_or_compose_file(plan, render_stack(plan), output)


def write_stack_or_compose_file(plan: Plan, stack: Stack, output: Path) -> str:
    """Write `stack`, rendered from `plan`, to `output`. Return text for the user, with the command that deploys it."""
    write_stack(stack, output)
    return "\n".join([f"wrote {output}", *plan.notes, f"next: {stack.command_template.format(file=output, name=stack.name)}"])
