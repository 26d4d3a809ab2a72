"""Several ranks on this machine, compared with one; and what a rank prints that runs out of memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.acceptance.models import MODEL_1B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.session import Sections, build_config, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_worker, run_worker_ranks
from swarmtrain.trainer.checkpoint.storage.tensor_storage import StagingBuffer
from swarmtrain.trainer.health.peer_monitor import PeerMonitor

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
_RUN_SECONDS = 40.0


def run(context: StageContext) -> Iterator[Row]:
    """Yield the comparisons of two ranks with one, and whether a rank survives its peer.

    With at least two GPUs over NCCL, in all topologies, with the speed of all GPUs. With one GPU, two ranks share it, which NCCL refuses:
    they communicate over gloo, which cannot send between two ranks from GPU memory. Without a GPU, all topologies over gloo.
    """
    base = merge_sections(TINY, _FLOAT32)
    arguments = {"sections": base, "shares_gpu": False}
    limit = context.scale_limit(_RUN_SECONDS)
    *_, reference = run_worker(train, arguments, timeout=limit)
    shares_gpu = context.gpu_count == 1
    for name, topology in _TOPOLOGIES.items():
        if shares_gpu and name == _PIPELINE_PARALLEL:
            yield Row(name, Outcome.skipped, reason="needs two GPUs: two ranks cannot share one with NCCL")
            continue
        rows = run_worker_ranks(train, {"sections": merge_sections(base, topology), "shares_gpu": shares_gpu}, 2, timeout=limit)
        yield _compare(f"{name}, two ranks", rows, reference)
    if shares_gpu:
        yield Row("killed rank", Outcome.skipped, reason="needs two GPUs: over gloo, a collective ends when a peer dies")
    else:
        yield _find_row("killed rank", run_worker_ranks(lose_peer, {"sections": base}, 2, timeout=limit))
    if context.is_cuda:
        yield from run_worker(run_out_of_memory, {}, timeout=limit)
    if context.gpu_count > 1:
        yield from _measure_speed(min(context.gpu_count, _MAX_RANKS))


def train(sections: Mapping[str, Any], shares_gpu: bool) -> Iterator[Row]:
    """Train a few steps, and yield the losses and gradient norms. `shares_gpu`: all ranks use one GPU, and communicate over gloo."""
    if shares_gpu:
        dist.init_process_group("cpu:gloo,cuda:gloo")
    with open_session(build_config(sections)) as session:
        results = [session.run_step(number) for number in range(1, _STEPS + 1)]
    yield Row("train", values={"losses": [each.loss for each in results], "norms": [each.update.gradient_norm for each in results]})
    if shares_gpu:
        dist.destroy_process_group()


def lose_peer(sections: Mapping[str, Any]) -> Iterator[Row]:
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
        values = {"seconds": time.perf_counter() - start_time, "error": failure}
        staged = bytes(StagingBuffer(session.runtime.device).stage_tensors(list(session.model.parameters.values())))
        expected = b"".join(tensor.cpu().numpy().tobytes() for tensor in before.values())
        is_unchanged = staged == expected and not session.optimizer.is_prepared
        reason = "the state before the step has changed" if failure else "the step did not fail"
        yield Row.from_check("killed rank", bool(failure) and is_unchanged, values, reason)
        os._exit(0)  # the group of a dead peer cannot be destroyed


def run_out_of_memory() -> Iterator[Row]:
    """Train with a micro batch that no GPU can hold, and yield whether the error says which memory was used for what."""
    sections = merge_sections(MODEL_1B, {"topology": {"global_batch_size": 512, "micro_batch_size": 512}})
    try:
        with open_session(build_config(sections)) as session:
            session.run_step(1)
        yield Row("out of memory", Outcome.failed, reason="the step did not run out of memory")
    except SwarmtrainError as error:
        yield Row.from_check("out of memory", "memory" in error.message, {"error": error.plain_text.strip()}, "does not explain the memory")
    except torch.OutOfMemoryError as error:
        yield Row("out of memory", Outcome.failed, reason=f"not explained: {error}")


def _find_row(name: str, rows: list[Row]) -> Row:
    """Return the row `name`; if there is none, a failed row with the reasons of the others."""
    return next((row for row in rows if row.name == name), Row(name, Outcome.failed, reason="\n".join(row.reason for row in rows)))


def _compare(name: str, rows: list[Row], reference: Row) -> Row:
    if failed := next((row for row in [reference, *rows] if row.outcome is Outcome.failed), None):
        return Row(name, Outcome.failed, reason=failed.reason)
    error = max(
        abs(value - expected) / abs(expected)
        for row in rows
        for key in ("losses", "norms")
        for value, expected in zip(row.values[key], reference.values[key], strict=True)
    )
    return Row.from_check(name, error <= _TOLERANCE, {"error": error}, f"differs from one rank by more than {_TOLERANCE}")


def _measure_speed(ranks: int) -> Iterator[Row]:
    """Yield the speed of DDP and FSDP on `ranks` GPUs, as a multiple of that of one GPU."""
    for name in ("DDP", "FSDP"):
        tokens_per_second = {}
        for count in (1, ranks):
            topology = {**_TOPOLOGIES[name].get("topology", {}), "global_batch_size": 4 * count, "micro_batch_size": 4}
            sections = merge_sections(MODEL_1B, {"topology": topology})
            rows = run_worker_ranks(measure, {"sections": sections}, count, timeout=90)
            if failed := next((row for row in rows if row.outcome is Outcome.failed), None):
                yield Row(f"{name}, speed", Outcome.failed, reason=failed.reason)
                break
            tokens_per_second[count] = rows[0].values["tokens_per_second"]
        else:
            scaling = tokens_per_second[ranks] / tokens_per_second[1] / ranks
            yield Row(f"{name}, speed", values={"ranks": ranks, "tokens_per_second": tokens_per_second[ranks], "scaling": scaling})


def measure(sections: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the tokens per second of all ranks together."""
    from swarmtrain.trainer.speed.bench import run_benchmark

    with open_session(build_config(sections)) as session:
        results = run_benchmark(session.runtime, session.model, session.optimizer, session.data, steps=_SPEED_STEPS, warmup_steps=3)
        yield Row("speed", values={"tokens_per_second": results["tokens_per_second"]})
