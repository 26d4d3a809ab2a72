"""Several ranks on this machine, compared with one; and what a rank prints that runs out of memory.

With at least two GPUs over NCCL, in all topologies, with the speed of all GPUs. With one GPU, two ranks share it, which NCCL refuses: they
communicate over gloo, which cannot send between two ranks from GPU memory. Without a GPU, all topologies over gloo.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from conftest import Machine, Row
from models import MODEL_1B, TINY, Sections, build_config, merge_sections
from workers import Worker, WorkerFailed, call_on_ranks

from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.checkpoint.storage.tensor_storage import StagingBuffer
from swarmtrain.trainer.health.peer_monitor import PeerMonitor
from swarmtrain.trainer.speed.bench import run_benchmark
from swarmtrain.trainer.speed.session import open_session

_STEPS = 3
_TOLERANCE = 1e-5
_MAX_RANKS = 8
_FLOAT32: Sections = {"transformer_architecture": {"precision": "float32"}, "topology": {"global_batch_size": 8, "micro_batch_size": 2}}
_PIPELINE_PARALLEL = "pipeline parallel"
_TOPOLOGIES: Mapping[str, Sections] = {
    "DDP": {},
    "FSDP": {"topology": {"data_parallel_type": "fsdp"}},
    "tensor parallel": {"topology": {"model_parallel_size": 2}},
    "tensor and sequence parallel": {"topology": {"model_parallel_size": 2, "sequence_parallel": True}},
    _PIPELINE_PARALLEL: {"topology": {"pipe_parallel_size": 2}},
    "context parallel": {"topology": {"context_parallel_size": 2}},
}
_SPEED_STEPS = 8
_LIMIT_SECONDS = 40.0
_BASE = merge_sections(TINY, _FLOAT32)


@pytest.fixture(scope="module")
def reference(machine: Machine) -> dict[str, list[float]]:
    """The results of one rank."""
    with Worker() as worker:
        results: dict[str, list[float]] = worker.call(train, sections=_BASE, shares_gpu=False, timeout=machine.scale_limit(_LIMIT_SECONDS))
        return results


@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_two_ranks_equal_one(row: Row, machine: Machine, reference: dict[str, list[float]], name: str) -> None:
    row.name = f"{name}, two ranks"
    shares_gpu = machine.gpu_count == 1
    if shares_gpu and name == _PIPELINE_PARALLEL:
        pytest.skip("needs two GPUs: two ranks cannot share one with NCCL")
    sections, limit = merge_sections(_BASE, _TOPOLOGIES[name]), machine.scale_limit(_LIMIT_SECONDS)
    results = call_on_ranks(train, 2, sections=sections, shares_gpu=shares_gpu, timeout=limit)
    _raise_failure(results)
    row.values["error"] = max(
        abs(value - expected) / abs(expected)
        for result in results
        for key in ("losses", "norms")
        for value, expected in zip(result[key], reference[key], strict=True)
    )
    assert row.values["error"] <= _TOLERANCE


def test_killed_rank(row: Row, machine: Machine) -> None:
    if machine.gpu_count == 1:
        pytest.skip("needs two GPUs: over gloo, a collective ends when a peer dies")
    results = call_on_ranks(lose_peer, 2, sections=_BASE, timeout=machine.scale_limit(_LIMIT_SECONDS))
    _raise_failure(results[:1])
    row.values |= results[0]
    assert row.values["error"], "the step did not fail"
    assert row.values.pop("is_unchanged"), "the state before the step has changed"


def test_out_of_memory(row: Row, machine: Machine, worker: Worker) -> None:
    if not machine.is_cuda:
        pytest.skip("needs a GPU")
    row.values["error"] = worker.call(run_out_of_memory, timeout=_LIMIT_SECONDS)
    assert "memory" in row.values["error"]


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_speed_of_all_gpus(row: Row, machine: Machine, name: str) -> None:
    row.name = f"{name}, speed"
    if machine.gpu_count < 2:
        pytest.skip("needs two GPUs")
    ranks, tokens_per_second = min(machine.gpu_count, _MAX_RANKS), {}
    for count in (1, ranks):
        topology = {**_TOPOLOGIES[name].get("topology", {}), "global_batch_size": 4 * count, "micro_batch_size": 4}
        results = call_on_ranks(measure_speed, count, sections=merge_sections(MODEL_1B, {"topology": topology}), timeout=90)
        _raise_failure(results)
        tokens_per_second[count] = results[0]
    scaling = tokens_per_second[ranks] / tokens_per_second[1] / ranks
    row.values |= {"ranks": ranks, "tokens_per_second": tokens_per_second[ranks], "scaling": scaling}
    assert scaling > 0


def train(sections: Sections, shares_gpu: bool) -> dict[str, list[float]]:
    """Train a few steps, and return the losses and gradient norms. `shares_gpu`: all ranks use one GPU, and communicate over gloo."""
    if shares_gpu:
        dist.init_process_group("cpu:gloo,cuda:gloo")
    with open_session(build_config(sections)) as session:
        results = [session.run_step(number) for number in range(1, _STEPS + 1)]
    if shares_gpu:
        dist.destroy_process_group()
    return {"losses": [each.loss for each in results], "norms": [each.update.gradient_norm for each in results]}


def lose_peer(sections: Sections) -> Iterator[dict[str, Any]]:
    """Train a few steps, after which the last rank is killed. On the others, yield whether the next step ends and changes nothing."""
    with (
        open_session(build_config(sections), monitors_peers=True) as session,
        PeerMonitor(session.model.mesh.process_groups, session.runtime.device) as monitor,
    ):
        for number in range(1, _STEPS + 1):
            session.run_step(number, monitor.raise_if_peer_failed)
        before = {name: parameter.detach().clone() for name, parameter in session.model.parameters.items()}
        if session.runtime.rank == session.runtime.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start_time, failure = time.perf_counter(), ""
        try:
            session.run_step(_STEPS + 1, monitor.raise_if_peer_failed)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        seconds = time.perf_counter() - start_time
        staged = bytes(StagingBuffer(session.runtime.device).stage_tensors(list(session.model.parameters.values())))
        expected = b"".join(tensor.cpu().numpy().tobytes() for tensor in before.values())
        is_unchanged = staged == expected and not session.optimizer.is_prepared
        yield {"seconds": seconds, "error": failure, "is_unchanged": is_unchanged}  # the group of a dead peer cannot be destroyed


def run_out_of_memory() -> str:
    """Train with a micro batch that no GPU can hold, and return the error."""
    sections = merge_sections(MODEL_1B, {"topology": {"global_batch_size": 512, "micro_batch_size": 512}})
    try:
        with open_session(build_config(sections)) as session:
            session.run_step(1)
    except SwarmtrainError as error:
        return error.plain_text.strip()
    raise AssertionError("the step did not run out of memory")


def measure_speed(sections: Sections) -> float:
    """Return the tokens per second of all ranks together."""
    with open_session(build_config(sections)) as session:
        speed: float = run_benchmark(session, steps=_SPEED_STEPS, warmup_steps=3)["tokens_per_second"]
        return speed


def _raise_failure(results: list[Any]) -> None:
    if failure := next((result for result in results if isinstance(result, WorkerFailed)), None):
        raise failure
