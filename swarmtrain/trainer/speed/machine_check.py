"""Check training on this machine: losses against those of the CPU, and speed against a plain loop. `swarmtrain doctor --train`.

Each measurement is a process of its own, `python -m swarmtrain.trainer losses` or `speed`: a process that has used a GPU cannot train
without it. Without a GPU, the same checks train tiny models on the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

import torch

from swarmtrain.config import Config
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, ProcessError, SwarmtrainError
from swarmtrain.process import format_command, start_process
from swarmtrain.protocol.distributed_env import LOOPBACK, reserve_port
from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.speed.bench import run_benchmark
from swarmtrain.trainer.speed.plain_loop import build_plain_step
from swarmtrain.trainer.speed.session import open_session

_LOSS_STEPS, _SPEED_STEPS, _WARMUP_STEPS, _TIMEOUT_SECONDS = 3, 12, 4, 600.0
_FLOAT32_TOLERANCE, _BFLOAT16_TOLERANCE, _SPEED_GOAL = 1e-5, 2e-3, 0.9
_SMALL_MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 2,
    "num_attention_heads": 2,
    "sequence_length": 256,
    "mlp_type": "swiglu",
}
_LARGE_MODEL = {
    **_SMALL_MODEL,
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_layers": 16,
    "num_attention_heads": 8,
    "sequence_length": 2048,
}
_DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
_LOSS_CHECKS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "float32": ({}, _FLOAT32_TOLERANCE),
    "bfloat16": ({"precision": "bfloat16"}, _BFLOAT16_TOLERANCE),
    "bfloat16, documents": ({"precision": "bfloat16", **_DOCUMENTS}, _BFLOAT16_TOLERANCE),
}
"""The architecture, and by how much the loss may differ from the loss in float32 on the CPU, relatively."""


@dataclass(frozen=True)
class _CheckResult:
    name: str
    outcome: str
    """passed, failed, missed (a measurement below its goal; everything is correct), measured or skipped."""
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        mark = {"passed": "ok", "failed": "FAILED"}.get(self.outcome, self.outcome)
        values = (
            f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in self.values.items()
        )
        return "\n".join([f"{mark:10}{self.name:30}{', '.join(values)}".rstrip(), *(f"{'':10}{line}" for line in self.reason.splitlines())])


@handle_cli_errors
def main(request: Mapping[str, Any]) -> int:
    """Check training on the `device` of the request (auto, cuda or cpu), and print each result at once; with `json`, as a JSON line.

    Return 1 if a check failed, else 0; a missed goal is not a failure. Raises SwarmtrainError if torch cannot use the GPU that is required
    or that the machine seems to have.
    """
    device_type, gpu_count = detect_device(request["device"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that everything that was started is stopped
    failed_count = 0
    for name, check in (("losses", _check_losses), ("two ranks", _check_two_ranks), ("speed", _check_speed)):
        for result in _list_results(name, check(device_type, gpu_count)):
            sys.stdout.write(f"{json.dumps(asdict(result)) if request['json'] else result}\n")
            sys.stdout.flush()
            failed_count += result.outcome == "failed"
    sys.stderr.write(f"{failed_count} failed\n" if failed_count else "no check failed\n")
    return EXIT_ERROR if failed_count else EXIT_OK


def detect_device(requested: str) -> tuple[str, int]:
    """Return the type of the device, cuda or cpu, for the request auto, cuda or cpu, and the number of GPUs.

    Raises SwarmtrainError if torch cannot use the GPU that is requested or that the machine seems to have.
    """
    gpu_count = 0 if requested == "cpu" else torch.cuda.device_count()
    expects_gpu = requested == "cuda" or (requested == "auto" and shutil.which("nvidia-smi") is not None)
    if expects_gpu and not gpu_count:
        raise SwarmtrainError(
            "torch finds no CUDA device" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA",
            place="this machine",
            hint="check the driver with nvidia-smi; --device cpu runs the same checks without a GPU",
        )
    return "cuda" if gpu_count else "cpu", gpu_count


def _list_results(name: str, results: Iterator[_CheckResult]) -> Iterator[_CheckResult]:
    try:
        yield from results
    except SwarmtrainError as error:  # the other checks still run
        yield _CheckResult(name, "failed", reason=error.plain_text.strip())


def _check_losses(device_type: str, _gpu_count: int) -> Iterator[_CheckResult]:
    configs = {name: _build_config(architecture) for name, (architecture, _) in _LOSS_CHECKS.items()}
    in_float32 = {name: _build_config({**architecture, "precision": "float32"}) for name, (architecture, _) in _LOSS_CHECKS.items()}
    references, losses = _query_trainer("losses", in_float32, "cpu"), _query_trainer("losses", configs, device_type)
    for name, (_, tolerance) in _LOSS_CHECKS.items():
        yield _compare(f"losses: {name}", losses[name], references[name], tolerance, "float32 on the CPU")


def _check_two_ranks(device_type: str, gpu_count: int) -> Iterator[_CheckResult]:
    if gpu_count == 1:
        yield _CheckResult("two ranks", "skipped", reason="needs two GPUs")
        return
    [reference] = _query_trainer("losses", {"one rank": _build_config({})}, device_type).values()
    for name in ("ddp", "fsdp"):
        [losses] = _query_trainer("losses", {name: _build_config({}, data_parallel_type=name)}, device_type, ranks=2).values()
        yield _compare(f"two ranks: {name}", losses, reference, _FLOAT32_TOLERANCE, "one rank")


def _check_speed(device_type: str, _gpu_count: int) -> Iterator[_CheckResult]:
    architecture = {**_LARGE_MODEL, "precision": "bfloat16"} if device_type == "cuda" else {}
    speed = _query_trainer("speed", {"config": _build_config(architecture, global_batch_size=4, micro_batch_size=4)}, device_type)
    if device_type == "cpu":  # a tiny model, on a machine that may be busy
        yield _CheckResult("speed", "measured", speed)
    elif speed["ratio"] >= _SPEED_GOAL:
        yield _CheckResult("speed", "passed", speed)
    else:
        yield _CheckResult("speed", "missed", speed, f"goal: at least {_SPEED_GOAL} × the speed of a plain loop")


def _compare(name: str, losses: list[float], references: list[float], tolerance: float, reference_name: str) -> _CheckResult:
    loss_error = max(abs(loss - reference) / abs(reference) for loss, reference in zip(losses, references, strict=True))
    is_equal = all(
        abs(loss - reference) <= tolerance * abs(reference) for loss, reference in zip(losses, references, strict=True)
    )  # not NaN
    reason = "" if is_equal else f"differs from {reference_name} by more than {tolerance:g}"
    return _CheckResult(name, "passed" if is_equal else "failed", {"loss_error": loss_error, "loss": losses[-1]}, reason)


def _build_config(architecture: Mapping[str, Any], **topology: Any) -> dict[str, Any]:
    return {
        "transformer_architecture": {**_SMALL_MODEL, **architecture},
        "topology": {"global_batch_size": 8, "micro_batch_size": 2, **topology},
        "trainer": {"train_iterations": 1000, "compile": False},
    }


def _query_trainer(command: str, request: Mapping[str, Any], device_type: str, ranks: int = 1) -> dict[str, Any]:
    """Run a command of the trainer on `ranks` ranks, and return rank 0's response. Raises SwarmtrainError if a rank fails."""
    # Threads that wait for each other on a busy machine would slow down tiny models a hundredfold.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | (
        {"CUDA_VISIBLE_DEVICES": ""} if device_type == "cpu" else {}
    )
    port = reserve_port()
    if ranks > 1:
        environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    argv, pipe = [sys.executable, "-m", "swarmtrain.trainer", command], subprocess.PIPE
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            env = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            children.append(start_process(argv, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, die_with_parent=True))
            if children[-1].stdin is not None:
                children[-1].stdin.write(json.dumps(request).encode())
                children[-1].stdin.close()
                children[-1].stdin = None  # communicate() would flush it
        outputs = [child.communicate(timeout=_TIMEOUT_SECONDS)[0].decode(errors="replace").strip() for child in children]
    except subprocess.TimeoutExpired:
        raise ProcessError(format_command(argv), 124, f"did not finish within {_TIMEOUT_SECONDS:g} s") from None
    finally:
        port.close()
        for child in children:
            child.kill()
            child.wait()
    for child, output in zip(children, outputs, strict=True):
        if child.returncode:
            raise ProcessError(format_command(argv), child.returncode, output)
    responses: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output in outputs]  # the trainer also logs
    if error := next((response["error"] for response in responses if "error" in response), None):
        raise SwarmtrainError(error["message"], place=error["place"], hint=error["hint"])
    return responses[0]


def measure_losses(configs: Mapping[str, Any]) -> dict[str, list[float]]:
    """Train each of `configs` for a few steps, and return the losses of each step in nats, by name. Collective: all ranks must call it."""
    return {name: _train(Config.from_json(json.dumps(values))) for name, values in configs.items()}


def _train(config: Config) -> list[float]:
    with open_session(config) as session:
        return [session.run_step(number).loss for number in range(1, _LOSS_STEPS + 1)]


def measure_speed(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train the `config` of the request with the trainer, then with a plain loop. Return the times, and plain over trainer as `ratio`."""
    config = Config.from_json(json.dumps(request["config"]))
    with open_session(config) as session:
        results, device = run_benchmark(session, steps=_SPEED_STEPS, warmup_steps=_WARMUP_STEPS), session.runtime.device
    del session
    gc.collect()  # a model is part of reference cycles
    shape = config.topology.samples_per_step, config.transformer_architecture.sequence_length + 1
    batches = [torch.randint(config.transformer_architecture.vocab_size, shape) for _ in range(4)]
    run_plain_step, durations = build_plain_step(config, device, cycle(batches).__next__), []
    for _ in range(_WARMUP_STEPS + _SPEED_STEPS):
        start_time = time.perf_counter()
        run_plain_step()  # reads the loss, and so waits for the device
        durations.append(time.perf_counter() - start_time)
    seconds, plain_seconds = results["step_seconds"]["median"], median(durations[_WARMUP_STEPS:])
    values = {"ratio": plain_seconds / seconds, "step_seconds": seconds, "plain_step_seconds": plain_seconds}
    return values | {name: results[name] for name in ("tokens_per_second", "mfu", "device") if name in results}
