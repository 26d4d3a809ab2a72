"""Benchmark a config on this machine: run a few training steps, without metrics, checkpoints or validation.

    python -m swarmtrain.trainer bench examples/quickstart.yml -o topology.micro_batch_size=4 --steps 20
    torchrun --nproc-per-node 8 -m swarmtrain.trainer bench CONFIG

If the config's data is missing, random tokens are used: token values do not affect the duration of a step.
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
from swarmtrain.trainer import collectives
from swarmtrain.trainer.custom.model_loop import select_training
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import TokenDataset, open_data
from swarmtrain.trainer.health.step_timer import OTHER
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout, StopFlag
from swarmtrain.trainer.instrumentation import StepInstruments
from swarmtrain.trainer.metrics import flops
from swarmtrain.trainer.metrics.memory_usage import read_memory_usage
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime, read_config, start_runtime
from swarmtrain.trainer.step import StepRequest

_DEFAULT_STEPS, _DEFAULT_WARMUP_STEPS = 20, 3
_DOCUMENT_COUNT = 64
_P10_INDEX, _P90_INDEX = 0, 8  # indices into the nine deciles


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the command line `argv` describes, on all ranks together. Rank 0 prints the results.

    Return the exit code.
    Raises SwarmtrainError if the config is invalid or the run cannot start.
    """
    parser = argparse.ArgumentParser(
        prog="python -m swarmtrain.trainer bench", description="Benchmark the training speed of a config on this machine."
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("-o", dest="override", metavar="KEY=VALUE", action="append", default=[], help="override a config value")
    parser.add_argument("--steps", type=_parse_positive_int, default=_DEFAULT_STEPS, help=f"number of steps to measure ({_DEFAULT_STEPS})")
    parser.add_argument(
        "--warmup",
        type=int,
        default=_DEFAULT_WARMUP_STEPS,
        help=f"number of warmup steps before the measured steps ({_DEFAULT_WARMUP_STEPS})",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(argv)
    config = read_config([args.config, *args.override, "trainer.tensor_statistics_recorder_config=null"])
    with start_runtime(config) as runtime, open_or_generate_data(runtime) as (data, is_synthetic):
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime)
        results = run_benchmark(runtime, model, Optimizer(model, config), data, steps=args.steps, warmup_steps=args.warmup)
        if runtime.is_rank_zero:
            sys.stdout.write(f"{json.dumps(results) if args.json else _format_results_table(results, is_synthetic=is_synthetic)}\n")
    return 0


def run_benchmark(
    runtime: Runtime, model: ParallelModel, optimizer: Optimizer, data: TokenDataset, *, steps: int, warmup_steps: int
) -> dict[str, Any]:
    """Run `warmup_steps` steps without measuring, then measure `steps` steps.

    Return the results: seconds per step and per phase, tokens per second, memory in bytes.

    Collective: all ranks must call it.
    """
    config, step_seconds, phase_seconds, tokens = runtime.config, [], [], 0
    training, collective_timeout = select_training(runtime, model, optimizer, data), CollectiveTimeout(model.mesh.process_groups)
    with StopFlag() as stop, StepInstruments(runtime, model, training.optimizer, collective_timeout) as instruments:
        timer = instruments.start_step_timer(data, 0)
        for number in range(1, warmup_steps + steps + 1):
            position = (number - 1) * config.topology.samples_per_step
            start_time = time.perf_counter()
            with instruments.instrument_step(number):
                result = training.run_step(model, StepRequest(number, position, stop, timer))
            training.finish_round(number, timer, collective_timeout, lambda: None)
            if number > warmup_steps:
                step_seconds.append(time.perf_counter() - start_time)
                phase_seconds.append(instruments.phase_seconds)
                tokens += result.loss_tokens
    tokens_per_second, flops_per_token = (
        tokens / sum(step_seconds),
        flops.compute_flops_per_token(config.transformer_architecture, model.parameter_count),
    )
    deciles = quantiles(step_seconds, n=10, method="inclusive") if steps > 1 else step_seconds * 9
    results: dict[str, Any] = {
        "ranks": runtime.world_size,
        "parameters": model.parameter_count,
        "steps": steps,
        "step_seconds": {"median": median(step_seconds), "p10": deciles[_P10_INDEX], "p90": deciles[_P90_INDEX]},
        "phases": {
            name: median(each.get(name, 0.0) for each in phase_seconds)
            for name in dict.fromkeys(part for each in phase_seconds for part in each)
        },
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / runtime.world_size,
        "tflops_per_device": tokens_per_second * flops_per_token / runtime.world_size / 1e12,
        "memory": read_memory_usage(runtime.device),
    }
    if runtime.device.type == "cuda":
        results["device"] = torch.cuda.get_device_name(runtime.device)
        if peak := flops.find_peak_flops(results["device"], config.transformer_architecture.precision):
            results["mfu"] = tokens_per_second * flops_per_token / runtime.world_size / peak
    return results


@contextmanager
def open_or_generate_data(runtime: Runtime) -> Iterator[tuple[TokenDataset, bool]]:
    """Yield the training data, and whether the data is synthetic: random tokens are used if token files are missing on any rank."""
    data_config = runtime.config.data
    prefixes = [*data_config.data_prefixes, *chain(*data_config.collect_companion_prefixes())]
    if all(collectives.all_gather_values(bool(prefixes) and all(map(memory_map.has_token_files, prefixes)))):
        yield open_data(runtime.config)[0], False
        return
    folder = Path(tempfile.gettempdir()) / collectives.run_on_rank_zero(lambda: f"swarmtrain-bench-{secrets.token_hex(8)}")
    prefixes = [folder / f"tokens-{row}" for row in range(data_config.rows_per_sample)]
    companions = tuple(prefixes[1:])
    try:
        with runtime.local_rank_zero_first():
            if not runtime.local_rank:
                folder.mkdir(mode=0o700)
                for row, prefix in enumerate(prefixes):
                    _write_random_tokens(prefix, runtime.config, row)
        synthetic_config = type(data_config)(
            data_prefixes=(prefixes[0],),
            rejected_prefixes=companions if data_config.rejected_prefixes else (),
            positive_prefixes=companions[:1] if data_config.positive_prefixes else (),
            negative_prefixes=companions[1:] if data_config.negative_prefixes else (),
            packing=data_config.packing,
        )
        yield open_data(runtime.config.model_copy(update={"data": synthetic_config}))[0], True
    finally:
        if not runtime.local_rank:
            shutil.rmtree(folder, ignore_errors=True)


def _write_random_tokens(prefix: Path, config: Config, row: int) -> None:
    """Write token files for one row of each sample; the rows of a sample differ."""
    architecture = config.transformer_architecture
    document_length = (
        max(1, config.topology.samples_per_step) * (architecture.sequence_length + 1) // _DOCUMENT_COUNT + architecture.sequence_length + 1
    )
    documents = np.random.default_rng((config.trainer.seed, row)).integers(architecture.vocab_size, size=(_DOCUMENT_COUNT, document_length))
    memory_map.write_token_files(prefix, documents, "uint16" if architecture.vocab_size <= np.iinfo(np.uint16).max else "uint32")


def _format_results_table(results: Mapping[str, Any], *, is_synthetic: bool) -> str:
    step, device = results["step_seconds"], f" on {results['device']}" if "device" in results else ""
    mfu_text = f", MFU {results['mfu']:.1%}" if "mfu" in results else ""
    rows = [
        ("ranks", f"{results['ranks']}{device}"),
        ("parameters", f"{results['parameters']:,}"),
        (
            "step",
            f"{_format_milliseconds(step['median'])}, median of {results['steps']}; p10 {_format_milliseconds(step['p10'])}, p90 "
            f"{_format_milliseconds(step['p90'])}",
        ),
        *((f"  {name}", _format_milliseconds(seconds)) for name, seconds in results["phases"].items() if name != OTHER),
        ("tokens/s", f"{results['tokens_per_second']:,.0f}, {results['tokens_per_second_per_device']:,.0f} per device"),
        ("TFLOPs", f"{results['tflops_per_device']:.3g} per device{mfu_text}"),
        ("memory", ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in results["memory"].items())),
        *([("data", "synthetic: the config's data is not on this machine")] if is_synthetic else []),
    ]
    return "\n".join(f"{name:16}{text}" for name, text in rows)


def _format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _parse_positive_int(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count
