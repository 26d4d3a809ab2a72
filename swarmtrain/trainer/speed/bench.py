"""Measure the time of training steps on this machine, without metrics, checkpoints or validation: the only timer of the trainer's steps.

    python -m swarmtrain.trainer bench examples/quickstart.yml -o topology.micro_batch_size=4 --steps 20
    torchrun --nproc-per-node 8 -m swarmtrain.trainer bench CONFIG

If the config's data is missing, random tokens are used: token values do not affect the duration of a step.
measure_step_time is what `swarmtrain doctor --step-times` starts on each node.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import PowerSgdConfig
from swarmtrain.config.schema.topology import DataParallelType
from swarmtrain.trainer.custom.model_loop import choose_training_method
from swarmtrain.trainer.health.step_timer import BACKWARD, DATA, FORWARD, OTHER
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout, StopFlag
from swarmtrain.trainer.instrumentation import StepInstruments
from swarmtrain.trainer.metrics import throughput
from swarmtrain.trainer.metrics.memory_usage import read_memory_usage
from swarmtrain.trainer.parallel.gradient_compression.powersgd import count_sent_values
from swarmtrain.trainer.runtime import read_config
from swarmtrain.trainer.speed.session import TrainingSession, open_session
from swarmtrain.trainer.step import StepRequest

_DEFAULT_STEPS, _DEFAULT_WARMUP_STEPS = 20, 3
_P10_INDEX, _P90_INDEX = 0, 8  # indices into the nine deciles
_MICRO_BATCHES = 2
_MIN_STEPS, _MAX_STEPS = 3, 20
_RESET_TOPOLOGY: dict[str, Any] = {
    "learners": None,
    "gradient_compression": "none",
    "powersgd": PowerSgdConfig().model_dump(),
    "micro_batch_assignment": "equal",
    "world_size": None,
    "data_parallel_size": None,
    "gradient_accumulation_steps": None,
    "data_parallel_type": DataParallelType.ddp,
    "data_parallel_shard_size": None,
    "cpu_offload": False,
    "reduce_every_micro_batch": None,
}


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
    with open_session(config) as session:
        results = run_benchmark(session, steps=args.steps, warmup_steps=args.warmup)
        if session.runtime.is_rank_zero:
            sys.stdout.write(f"{json.dumps(results) if args.json else _format_results_table(results, is_synthetic=session.is_synthetic)}\n")
    return 0


def run_benchmark(session: TrainingSession, *, steps: int, warmup_steps: int) -> dict[str, Any]:
    """Run `warmup_steps` steps without measuring, then measure `steps` steps.

    Return the results: seconds per step and per phase, tokens per second, memory in bytes.

    Collective: all ranks must call it.
    """
    runtime, model, data = session.runtime, session.model, session.data
    config, step_seconds, phase_seconds, tokens = runtime.config, [], [], 0
    training, collective_timeout = (
        choose_training_method(runtime, model, session.optimizer, data),
        CollectiveTimeout(model.mesh.process_groups),
    )
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
        throughput.compute_flops_per_token(config.transformer_architecture, model.parameter_count),
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
        if peak := throughput.find_peak_flops(results["device"], config.transformer_architecture.precision):
            results["mfu"] = tokens_per_second * flops_per_token / runtime.world_size / peak
    return results


def measure_step_time(request: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of two micro batches on one rank alone, without communication, and return the median times.

    `request`: config (path of a config in JSON, whose replicas have one rank), seconds (about how long to measure). Return parameters,
    trainable_parameters, low_rank_values (those that PowerSGD would send), micro_batch_seconds (loading, forward
    and backward pass of one micro batch), and step_seconds (the rest of a step, such as the optimizer's update).
    """
    run_config = Config.from_json(Path(request["config"]).read_text(encoding="utf-8"))
    config = build_single_rank_config(run_config)
    with open_session(config) as session:
        first = run_benchmark(session, steps=1, warmup_steps=1)["step_seconds"]["median"]
        steps = max(_MIN_STEPS, min(_MAX_STEPS, int(request["seconds"] / first)))
        results = run_benchmark(session, steps=steps, warmup_steps=0)
        trainable = [parameter for parameter in session.model.parameters.values() if parameter.requires_grad]
        low_rank_values = sum(count_sent_values(parameter, run_config.topology.powersgd) for parameter in trainable)
    phases = results["phases"]
    micro_batch_seconds = sum(phases.get(name, 0.0) for name in (DATA, FORWARD, BACKWARD)) / _MICRO_BATCHES
    return {
        "parameters": results["parameters"],
        "trainable_parameters": sum(parameter.numel() for parameter in trainable),
        "low_rank_values": low_rank_values,
        "micro_batch_seconds": micro_batch_seconds,
        "step_seconds": max(0.0, results["step_seconds"]["median"] - _MICRO_BATCHES * micro_batch_seconds),
    }


def build_single_rank_config(config: Config) -> Config:
    """Return `config` for one rank and two micro batches per step, without files that the run writes."""
    micro_batch_size = config.topology.samples_per_micro_batch
    topology = {**_RESET_TOPOLOGY, "micro_batch_size": micro_batch_size, "global_batch_size": _MICRO_BATCHES * micro_batch_size}
    values = config.model_dump(mode="json")
    values["topology"] |= topology
    values["diloco"] = {}
    values["trainer"]["tensor_statistics_recorder_config"] = None
    values["optimizer"]["zero"] = False
    return Config.from_json(json.dumps(values))


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
