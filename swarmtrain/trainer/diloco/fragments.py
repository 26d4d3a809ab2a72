"""Fragments: parts of the model that are exchanged at different steps, and the steps at which their exchanges start and end.

With P fragments, the layers are divided over them with a stride: layer i belongs to fragment i modulo P. Each fragment is exchanged once
per round of H steps, fragment p after the steps p H / P, p H / P + H and so on. With an overlap of t steps, the exchange of a fragment that
starts after step s ends after step s + t. At most one exchange is in progress at a time, since t is less than H / P. After the last step
of the run, the exchange in progress ends, and all fragments are exchanged without overlap.

Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication (arXiv 2501.18512).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from swarmtrain.config.schema.optimizer import DilocoConfig

_LAYER_PATTERN = re.compile(r"^blocks\.(\d+)\.")


def list_starting_fragments(settings: DilocoConfig, step: int) -> list[int]:
    """Return the fragments whose exchange starts after `step`, unless it is the last of the run: at most one."""
    interval = settings.inner_steps // settings.fragments
    return [step % settings.inner_steps // interval] if step > 0 and step % interval == 0 else []


def assign_fragments(parameter_names: Iterable[str], layer_count: int, fragment_count: int) -> list[list[str]]:
    """Return the names of the parameters of each fragment. Embedding, final norm and output layer count as parts of the nearest layer."""
    fragments: list[list[str]] = [[] for _ in range(fragment_count)]
    for name in parameter_names:
        match = _LAYER_PATTERN.match(name)
        layer = int(match[1]) if match else 0 if name.startswith(("embedding.", "positions.")) else layer_count - 1
        fragments[layer % fragment_count].append(name)
    return fragments
