"""Time and memory of building the attention methods of long samples with several documents, which includes their masks."""

from __future__ import annotations

import time

import pytest
import torch
from conftest import Machine, Row
from models import DOCUMENTS, MODEL_1B, TINY, build_config, merge_sections
from workers import Worker

from swarmtrain.trainer.model.attention.selection import build_attention_methods
from swarmtrain.trainer.model.attention.visibility import Visibility

_DOCUMENTS_PER_SAMPLE = 8
_MAX_GIB = 0.1
"""Dense masks of 32,768 tokens would need 1 GiB for each byte of an entry."""


@pytest.mark.parametrize("length", [512, 8192, 16384, 32768])
def test_attention_masks(row: Row, machine: Machine, worker: Worker, length: int) -> None:
    row.name = f"mask of {length} tokens"
    if not machine.is_cuda and length > 512:
        pytest.skip("needs a GPU")
    row.values |= worker.call(build_masks, device_type=machine.device_type, length=length, timeout=machine.scale_limit(60))
    assert row.values.get("peak_gib", 0.0) < _MAX_GIB


def build_masks(device_type: str, length: int) -> dict[str, float]:
    sections = merge_sections(MODEL_1B if device_type == "cuda" else TINY, DOCUMENTS)
    architecture, device = build_config(sections).transformer_architecture, torch.device(device_type)
    documents = (torch.arange(length, device=device) * _DOCUMENTS_PER_SAMPLE // length)[None]
    values: dict[str, float] = {}
    for name in ("first", "second"):
        if device_type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        start_time = time.perf_counter()
        built = build_attention_methods(architecture, Visibility(1, length, device, documents), torch.bfloat16)
        if device_type == "cuda":
            torch.cuda.synchronize()
            values["peak_gib"] = (torch.cuda.max_memory_allocated() - allocated) / 2**30
        values[f"{name}_ms"] = 1e3 * (time.perf_counter() - start_time)
        del built
    return values
