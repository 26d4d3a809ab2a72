"""The memory that `swarmtrain memory` estimates, and the memory that training needs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from conftest import Machine, Row
from models import MODEL_1B, TINY, Sections, build_config, free_device_memory, merge_sections
from workers import Worker

from swarmtrain.trainer.memory import estimate_memory
from swarmtrain.trainer.speed.session import open_session

_STEPS = 3
_TOLERANCE = 0.1
_LIMIT_SECONDS = 60.0
_FEW_LAYERS: Sections = {"transformer_architecture": {"num_layers": 8}, "topology": {"global_batch_size": 2, "micro_batch_size": 2}}
_VARIANTS: Mapping[str, Sections] = {
    "eager": {},
    "selective recomputation": {"topology": {"activation_checkpointing_type": "selective"}},
    "recomputation of every layer": {"topology": {"activation_checkpointing_type": "every_layer"}},
    "two micro batches": {"topology": {"global_batch_size": 4}},
    "float32": {"transformer_architecture": {"precision": "float32"}},
    "FSDP, one rank": {"topology": {"data_parallel_type": "fsdp"}},
}


@pytest.mark.parametrize("name", _VARIANTS)
def test_estimated_memory(row: Row, machine: Machine, worker: Worker, cpu_worker: Worker, name: str) -> None:
    sections = merge_sections(MODEL_1B if machine.is_cuda else TINY, _FEW_LAYERS if machine.is_cuda else {}, _VARIANTS[name])
    limit = machine.scale_limit(_LIMIT_SECONDS)
    row.values["estimated_gib"] = estimated = cpu_worker.call(estimate, sections=sections, timeout=limit)
    if machine.is_cuda:
        row.values["measured_gib"] = measured = worker.call(measure, sections=sections, timeout=limit)
        row.values["ratio"] = estimated / measured
        assert abs(estimated / measured - 1) <= _TOLERANCE
    else:
        assert estimated > 0


def measure(sections: Sections) -> float:
    """Train a config for a few steps, and return the peak of the allocated memory, in GiB."""
    free_device_memory()
    with open_session(build_config(sections)) as session:
        for number in range(1, _STEPS + 1):
            session.run_step(number)
    return torch.cuda.max_memory_allocated() / 2**30


def estimate(sections: Sections) -> float:
    """Return the estimated peak of a config for one rank, in GiB."""
    return max(max(each.peak, each.startup_peak) for each in estimate_memory(build_config(sections), 1)) / 2**30
