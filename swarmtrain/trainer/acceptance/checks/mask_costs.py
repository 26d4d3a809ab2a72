"""Time and memory of building the attention methods of long samples with several documents, which includes their masks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from swarmtrain.trainer.acceptance.models import DOCUMENTS, MODEL_1B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Row
from swarmtrain.trainer.acceptance.session import build_config
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.model.attention.selection import build_attention_methods
from swarmtrain.trainer.model.attention.visibility import Visibility

_LENGTHS = {"cuda": (8192, 16384, 32768), "cpu": (512, 1024)}
_DOCUMENTS_PER_SAMPLE = 8


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for each length, for one sample."""
    sections = merge_sections(MODEL_1B if context.is_cuda else TINY, DOCUMENTS)
    architecture, device = build_config(sections).transformer_architecture, torch.device(context.device_type)
    for length in _LENGTHS[context.device_type]:
        documents = (torch.arange(length, device=device) * _DOCUMENTS_PER_SAMPLE // length)[None]
        values: dict[str, float] = {}
        for name in ("first", "second"):
            if context.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
            start_time = time.perf_counter()
            built = build_attention_methods(architecture, Visibility(1, length, device, documents), torch.bfloat16)
            if context.is_cuda:
                torch.cuda.synchronize()
                values["peak_gib"] = (torch.cuda.max_memory_allocated() - allocated) / 2**30
            values[f"{name}_ms"] = 1e3 * (time.perf_counter() - start_time)
            del built
        yield Row(f"mask of {length} tokens", values=values)
