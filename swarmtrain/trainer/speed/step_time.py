"""Measure the time of a training step on one rank alone, without communication. `swarmtrain doctor --step-times` runs it on each node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import PowerSgdConfig
from swarmtrain.config.schema.topology import DataParallelType
from swarmtrain.trainer.health.step_timer import BACKWARD, DATA, FORWARD
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel.gradient_compression.powersgd import count_sent_values
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import start_runtime
from swarmtrain.trainer.speed.bench import open_or_generate_data, run_benchmark

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


def measure_step_time(request: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of two micro batches, and return the median times.

    `request`: config (path of a config in JSON, whose replicas have one rank), seconds (about how long to measure). Return parameters,
    trainable_parameters, low_rank_values (those that PowerSGD would send), micro_batch_seconds (loading, forward
    and backward pass of one micro batch), and step_seconds (the rest of a step, such as the optimizer's update).
    """
    run_config = Config.from_json(Path(request["config"]).read_text(encoding="utf-8"))
    config = _build_single_rank_config(run_config)
    with start_runtime(config) as runtime, open_or_generate_data(runtime) as (data, _):
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime)
        optimizer = Optimizer(model, config)
        first = run_benchmark(runtime, model, optimizer, data, steps=1, warmup_steps=1)["step_seconds"]["median"]
        steps = max(_MIN_STEPS, min(_MAX_STEPS, int(request["seconds"] / first)))
        results = run_benchmark(runtime, model, optimizer, data, steps=steps, warmup_steps=0)
        trainable = [parameter for parameter in model.parameters.values() if parameter.requires_grad]
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


def _build_single_rank_config(config: Config) -> Config:
    """Return `config` for one rank and two micro batches per step, without files that the run writes."""
    micro_batch_size = config.topology.samples_per_micro_batch
    topology = {**_RESET_TOPOLOGY, "micro_batch_size": micro_batch_size, "global_batch_size": _MICRO_BATCHES * micro_batch_size}
    values = config.model_dump(mode="json")
    values["topology"] |= topology
    values["diloco"] = {}
    values["trainer"]["tensor_statistics_recorder_config"] = None
    values["optimizer"]["zero"] = False
    return Config.from_json(json.dumps(values))
