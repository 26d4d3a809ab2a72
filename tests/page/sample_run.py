"""The events of a sample run: three nodes with two GPUs each, a rank that dies, a fourth node, and an outcome."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from swarmtrain import protocol
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.protocol import Event

GIB = 2**30
START_TIME = 1795370400.0
STEPS = 1200
HOSTS = {f"node{number}": f"gpu-{number + 1}" for number in range(4)}
ECC_ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
PHASE_SECONDS = {"data": 0.012, "forward": 0.31, "backward": 0.62, "communication": 0.14, "optimizer": 0.045, "other": 0.02}


def build_events(*, outcome: str = "") -> list[Event]:
    """Return the events, oldest first. `outcome` is done, failed, or empty for a run that still trains."""
    return list(_generate_events(outcome))


def _generate_events(outcome: str) -> Iterator[Event]:
    rng = random.Random(7)  # noqa: S311  # noise, the same each time
    time = START_TIME
    for a, b in itertools.combinations(HOSTS, 2):
        slow = 0.2 if "node3" in (a, b) else 1.0
        speed = slow * rng.uniform(1.08e9, 1.17e9)
        link = {
            "a": a,
            "b": b,
            "round_trip": rng.uniform(4e-5, 9e-5) / slow,
            "forward_bandwidth": speed,
            "backward_bandwidth": speed * 0.98,
            "largest_packet": 8950,
        }
        yield Event(protocol.EVENT_LINK, {**link, "error": ""}, time - 60)
    yield Event(protocol.EVENT_OPERATION, {"operation": "up", "nodes": 3}, time)
    yield Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, time + 2)
    for node in ("node0", "node1", "node2"):
        yield _build_join(node, time + 4)
        yield _build_report(node, time + 4.5)
    yield _build_world(1, 3, time + 12)
    yield Event(protocol.EVENT_EVALUATION, {"step": 0, "loss": 10.83}, time + 14)
    yield from _generate_steps(rng, 1, 437, time + 15, 3)
    time += 15 + 437 * 1.15
    failure = {"node": "node1", "rank": 3, "local_rank": 1, "world": "w1", "exit_code": 1, "error": ECC_ERROR, "step": 437}
    yield Event(
        protocol.EVENT_FAILURE,
        {**failure, "traceback": f'Traceback (most recent call last):\n  File "train.py", line 57\n{ECC_ERROR}'},
        time,
    )
    yield _build_world(2, 3, time + 9)
    yield Event(protocol.EVENT_RESUMED, {"step": 400, "path": "runs/demo/step-00000400"}, time + 11)
    yield from _generate_steps(rng, 401, 760, time + 12, 3)
    time += 12 + 360 * 1.15
    yield _build_join("node3", time)
    yield _build_report("node3", time + 0.5)
    yield _build_world(3, 4, time + 6)
    yield Event(protocol.EVENT_RESUMED, {"step": 760, "path": "runs/demo/step-00000760"}, time + 7)
    last = {"": 1010, "done": STEPS, "failed": 1010}[outcome]
    yield from _generate_steps(rng, 761, last, time + 8, 4)
    time += 8 + (last - 760) * 0.9
    yield Event(protocol.EVENT_USAGE, {"nodes": {node: _build_usage(rng, node) for node in HOSTS}}, time - 1)
    yield Event(
        protocol.EVENT_STRAGGLER, {"rank": 7, "node": "node3", "slowdown": 0.31, "phase": "data", "message": _STRAGGLER_MESSAGE}, time - 0.5
    )
    if outcome == "done":
        yield Event(protocol.EVENT_TRAINING_FINISHED, {"step": STEPS, "initial_validation_loss": 10.83, "final_validation_loss": 3.2}, time)
        yield Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": f"the last step, {STEPS}, is done", "exit_code": 0}, time + 0.1)
    if outcome == "failed":
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has 79.15 GiB of which 1.91 GiB is free"
        trace = f'Traceback (most recent call last):\n  File "training_code.py", line 57, in <module>\n    main()\n{error}'
        failure = {"node": "node3", "rank": 7, "local_rank": 1, "world": "w3", "exit_code": 1, "error": error, "step": last}
        yield Event(protocol.EVENT_FAILURE, {**failure, "traceback": trace, "permanent": True}, time)
        yield Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": f"node3 rank 7: {error}", "exit_code": 1}, time + 0.4)


_STRAGGLER_MESSAGE = "rank 7 on node3: other ranks wait, a step takes 31 % longer, since data loading is slower there"


def _build_join(node: str, at: float) -> Event:
    number = int(node[-1])
    return Event(
        protocol.EVENT_NODE_JOINED,
        {"node": node, "host": f"c{number}", "address": f"10.0.1.{10 + number}", "interface": "eth0", "slots": 2},
        at,
    )


def _build_report(node: str, at: float) -> Event:
    versions = {"torch": "2.13.0+cu130", "nccl": "2.29.7", "driver": "580.95.05" if node != "node3" else "575.57.08", "python": "3.11.14"}
    facts = {"versions": versions, "devices": "2 × NVIDIA A100-SXM4-80GB", "git": {"commit": "4be1c09", "changed": "no"}}
    return Event(protocol.EVENT_RUN_REPORT, {"node": node, "parameters": "1,283,457,024", "tokens_per_step": 131072, **facts}, at)


def _build_world(number: int, nodes: int, at: float) -> Event:
    ranks = {f"node{node}": [2 * node, 2 * node + 1] for node in range(nodes)}
    return Event(protocol.EVENT_WORLD_FORMED, {"world": f"w{number}", "world_size": 2 * nodes, "nodes": nodes, "ranks": ranks}, at)


def _generate_steps(rng: random.Random, first: int, last: int, at: float, nodes: int) -> Iterator[Event]:
    seconds_per_step = 1.15 * 3 / nodes if nodes > 3 else 1.15
    for step in range(first, last + 1):
        at += seconds_per_step
        loss = 2.9 + 7.9 * math.exp(-step / 160) + 0.6 * math.exp(-step / 700) + rng.gauss(0, 0.05)
        speed = 131072 / seconds_per_step * rng.gauss(1, 0.015)
        rate = 3e-4 * min(step / 60, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        yield Event(
            protocol.EVENT_PROGRESS,
            {
                "step": step,
                "steps": STEPS,
                "loss": loss,
                "learning_rate": rate,
                "tokens_per_second": speed,
                "eta_seconds": (STEPS - step) * seconds_per_step,
                "gradient_norm": abs(rng.gauss(0.9, 0.12)) + 5 * math.exp(-step / 30) + (4 if step % 311 == 0 else 0),
                "tflops": speed * 7.7e9 / 1e12,
                "mfu": speed * 7.7e9 / (nodes * 2 * 312e12),
                "phases": {name: seconds * rng.gauss(1, 0.05) for name, seconds in PHASE_SECONDS.items()},
                "memory": {"allocated": 51 * GIB, "reserved": 63 * GIB, "peak": 61.5 * GIB, "total": 80 * GIB, "host": 21 * GIB},
                "metrics": {"accuracy": 0.42 * (1 - math.exp(-step / 300)) + rng.gauss(0, 0.004)},
            },
            at,
        )
        if step % 100 == 0:
            path = f"runs/demo/step-{step:08d}"
            yield Event(protocol.EVENT_CHECKPOINT, {"step": step, "path": path, "seconds": rng.uniform(2.1, 3.4)}, at + 0.3)
            yield Event(protocol.EVENT_EVALUATION, {"step": step, "loss": loss + 0.08}, at + 0.4)


def _build_usage(rng: random.Random, node: str) -> dict[str, object]:
    gpus = [
        {
            "utilization": rng.randint(94, 99),
            "memory": 64 * GIB,
            "memory_total": 80 * GIB,
            "temperature": 91 if (node, number) == ("node2", 1) else rng.randint(61, 72),
            "power": rng.randint(340, 395),
        }
        for number in range(2)
    ]
    return {"cpu": rng.uniform(9, 14), "cpus": 32.0, "memory": 61 * GIB, "memory_limit": 256 * GIB, "gpus": gpus}


def build_tasks(state: str = "running") -> list[TaskState]:
    """Return the state of each node's task."""
    return [*(TaskState(node, host, state) for node, host in HOSTS.items()), TaskState(protocol.RENDEZVOUS_SERVICE, "gpu-1", "running")]


def build_log_lines(end: float) -> list[LogLine]:
    """Return the output of the ranks, oldest first, with the last line at time `end`."""
    found = []
    for step in range(0, 1010, 10):
        at = end - (1010 - step) * 0.9
        found.append(LogLine("node0", f"step {step:>4}/1200  loss {2.9 + 7.9 * math.exp(-step / 160):.4f}  lr 2.9e-04", 0, at))
        if step % 100 == 0:
            found += [LogLine(node, f"loader: shard {step // 100} of 64 is open", 2 * int(node[-1]), at + 0.1) for node in HOSTS]
    error_lines = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB"]
    return [*found, *(LogLine("node3", text, 7, end - 0.2) for text in error_lines), LogLine("node3", '<b id="planted">markup</b>', 7, end)]
