"""How fast a config trains here: some steps and nothing else, no log, no checkpoint, no evaluation.

    python -m swarmtrain.trainer bench examples/quickstart.yml -o topology.micro_batch_size=4 --steps 20
    torchrun --nproc-per-node 8 -m swarmtrain.trainer bench CONFIG

Data that is not there is made up, since its tokens do not matter to how long a step takes.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from swarmtrain.config import Config
from swarmtrain.trainer import agreement
from swarmtrain.trainer.attended import Attended
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import Samples, open_data
from swarmtrain.trainer.guard import Patience, StopFlag
from swarmtrain.trainer.metrics import flops
from swarmtrain.trainer.metrics.room import used_memory
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel, parallelize
from swarmtrain.trainer.parts import OTHER
from swarmtrain.trainer.runtime import Runtime, read_config, start
from swarmtrain.trainer.step import make_step

_STEPS, _WARMUP = 20, 3
_DOCUMENTS = 64
_FAST, _SLOW = 0, 8  # of nine cuts into tenths


def main(argv: Sequence[str]) -> int:
    """Measure what the command line asks for, on all ranks together; rank 0 prints. Raises SwarmtrainError."""
    parser = argparse.ArgumentParser(prog="python -m swarmtrain.trainer bench", description="How fast a config trains here.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("-o", dest="override", metavar="KEY=VALUE", action="append", default=[], help="change a value of the config")
    parser.add_argument("--steps", type=_count, default=_STEPS, help=f"steps that are measured ({_STEPS})")
    parser.add_argument("--warmup", type=int, default=_WARMUP, help=f"steps before them ({_WARMUP})")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    asked = parser.parse_args(argv)
    config = read_config([asked.config, *asked.override, "trainer.tensor_statistics_recorder_config=null"])
    with start(config) as here, _data(here) as (data, made_up):
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), here)
        facts = measure(here, model, Optimizer(model, config), data, steps=asked.steps, warmup=asked.warmup)
        if here.first:
            sys.stdout.write(f"{json.dumps(facts) if asked.json else _table(facts, made_up=made_up)}\n")
    return 0


def measure(here: Runtime, model: ParallelModel, optimizer: Optimizer, data: Samples, *, steps: int, warmup: int) -> dict[str, Any]:
    """Return what `steps` steps come to, after `warmup` others: seconds, tokens a second, bytes. Called by all ranks together."""
    config, seconds, taken, tokens = here.config, [], [], 0
    with StopFlag() as stop, Attended(here, model, optimizer, Patience(model.mesh.groups)) as attended:
        parts = attended.measures(data, 0)
        for number in range(1, warmup + steps + 1):
            position = (number - 1) * config.topology.global_batch
            begun = time.perf_counter()
            with attended.step(number):
                made = make_step(here, model, optimizer, data, position=position, number=number, stop=stop, parts=parts)
            if number > warmup:
                seconds.append(time.perf_counter() - begun)
                taken.append(attended.taken)
                tokens += made.tokens
    speed, work = tokens / sum(seconds), flops.per_token(config.transformer_architecture, model.size)
    cuts = quantiles(seconds, n=10, method="inclusive") if steps > 1 else seconds * 9
    facts: dict[str, Any] = {
        "ranks": here.size,
        "parameters": model.size,
        "steps": steps,
        "step_seconds": {"median": median(seconds), "p10": cuts[_FAST], "p90": cuts[_SLOW]},
        "parts": {name: median(each.get(name, 0.0) for each in taken) for name in dict.fromkeys(part for each in taken for part in each)},
        "tokens_per_second": speed,
        "tokens_per_second_per_device": speed / here.size,
        "tflops_per_device": speed * work / here.size / 1e12,
        "memory": used_memory(here.device),
    }
    if here.device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(here.device)
        if peak := flops.peak(facts["device"], config.transformer_architecture.precision):
            facts["mfu"] = speed * work / here.size / peak
    return facts


@contextmanager
def _data(here: Runtime) -> Iterator[tuple[Samples, bool]]:
    """Give the config's training data, or, where it is not there on every node, tokens of no meaning; and whether it is these."""
    given = here.config.data
    prefixes = [*given.data_prefixes, *chain(*given.beside())]
    if all(agreement.gather(bool(prefixes) and all(map(memory_map.exists, prefixes)))):
        yield open_data(here.config)[0], False
        return
    folder = Path(tempfile.gettempdir()) / agreement.by_first_rank(lambda: f"swarmtrain-bench-{secrets.token_hex(8)}")
    prefix = folder / "tokens"
    try:
        with here.local_first():
            if not here.local_rank:
                folder.mkdir(mode=0o700)
                _write(prefix, here.config)
        made_up = type(given)(
            data_prefixes=(prefix,),
            rejected_prefixes=(prefix,) if given.rejected_prefixes else (),
            positive_prefixes=(prefix,) if given.positive_prefixes else (),
            negative_prefixes=(prefix,) * (given.rows - 2) if given.negative_prefixes else (),
            packing=given.packing,
        )
        yield open_data(here.config.model_copy(update={"data": made_up}))[0], True
    finally:
        if not here.local_rank:
            shutil.rmtree(folder, ignore_errors=True)


def _write(prefix: Path, config: Config) -> None:
    shape = config.transformer_architecture
    size = max(1, config.topology.global_batch) * (shape.sequence_length + 1) // _DOCUMENTS + shape.sequence_length + 1
    documents = np.random.default_rng(config.trainer.seed).integers(shape.vocab_size, size=(_DOCUMENTS, size))
    memory_map.write(prefix, documents, "uint16" if shape.vocab_size <= np.iinfo(np.uint16).max else "uint32")


def _table(facts: Mapping[str, Any], *, made_up: bool) -> str:
    step, device = facts["step_seconds"], f" on {facts['device']}" if "device" in facts else ""
    used = f", MFU {facts['mfu']:.1%}" if "mfu" in facts else ""
    rows = [
        ("ranks", f"{facts['ranks']}{device}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("step", f"{_ms(step['median'])}, the median of {facts['steps']}; p10 {_ms(step['p10'])}, p90 {_ms(step['p90'])}"),
        *((f"  {name}", _ms(seconds)) for name, seconds in facts["parts"].items() if name != OTHER),
        ("tokens/s", f"{facts['tokens_per_second']:,.0f}, {facts['tokens_per_second_per_device']:,.0f} a device"),
        ("TFLOPs", f"{facts['tflops_per_device']:.3g} a device{used}"),
        ("memory", ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in facts["memory"].items())),
        *([("data", "made up: the config's is not here")] if made_up else []),
    ]
    return "\n".join(f"{name:16}{text}" for name, text in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("is at least 1")
    return count
