"""A run as its board would have told it: three nodes with two GPUs each, a rank that dies, a fourth node, and how it ends."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.wire import Event

GIB = 2**30
BEGAN = 1795370400.0
STEPS = 1200
HOSTS = {f"node{number}": f"gpu-{number + 1}" for number in range(4)}
KILLED = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
PARTS = {"data": 0.012, "forward": 0.31, "backward": 0.62, "communication": 0.14, "optimizer": 0.045, "other": 0.02}


def told(*, end: str = "") -> list[Event]:
    """Return the events, oldest first; `end` is done, failed, or nothing while it trains."""
    return list(_told(end))


def _told(end: str) -> Iterator[Event]:
    chance = random.Random(7)  # noqa: S311  # noise, the same each time
    now = BEGAN
    for a, b in itertools.combinations(HOSTS, 2):
        slow = 0.2 if "node3" in (a, b) else 1.0
        speed = slow * chance.uniform(1.08e9, 1.17e9)
        link = {"a": a, "b": b, "round_trip": chance.uniform(4e-5, 9e-5) / slow, "there": speed, "back": speed * 0.98, "packet": 8950}
        yield Event(wire.LINK, {**link, "error": ""}, now - 60)
    yield Event(wire.ASKED, {"what": "up", "nodes": 3}, now)
    yield Event(wire.BOARD_UP, {"run": "demo"}, now + 2)
    for node in ("node0", "node1", "node2"):
        yield _joined(node, now + 4)
        yield _report(node, now + 4.5)
    yield _world(1, 3, now + 12)
    yield Event(wire.EVALUATION, {"step": 0, "loss": 10.83}, now + 14)
    yield from _steps(chance, 1, 437, now + 15, 3)
    now += 15 + 437 * 1.15
    failure = {"node": "node1", "rank": 3, "local_rank": 1, "world": "w1", "exit_code": 1, "error": KILLED, "step": 437}
    yield Event(wire.FAILURE, {**failure, "traceback": f'Traceback (most recent call last):\n  File "train.py", line 57\n{KILLED}'}, now)
    yield _world(2, 3, now + 9)
    yield Event(wire.RESUMED, {"step": 400, "path": "runs/demo/step-00000400"}, now + 11)
    yield from _steps(chance, 401, 760, now + 12, 3)
    now += 12 + 360 * 1.15
    yield _joined("node3", now)
    yield _report("node3", now + 0.5)
    yield _world(3, 4, now + 6)
    yield Event(wire.RESUMED, {"step": 760, "path": "runs/demo/step-00000760"}, now + 7)
    last = {"": 1010, "done": STEPS, "failed": 1010}[end]
    yield from _steps(chance, 761, last, now + 8, 4)
    now += 8 + (last - 760) * 0.9
    yield Event(wire.USAGE, {"nodes": {node: _used(chance, node) for node in HOSTS}}, now - 1)
    yield Event(wire.STRAGGLER, {"rank": 7, "node": "node3", "by": 0.31, "part": "data", "message": _SLOW}, now - 0.5)
    if end == "done":
        yield Event(wire.FINISHED, {"step": STEPS, "loss_before": 10.83, "loss_after": 3.2}, now)
        yield Event(wire.VERDICT, {"status": "done", "why": f"the last step, {STEPS}, is done", "exit_code": 0}, now + 0.1)
    if end == "failed":
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has 79.15 GiB of which 1.91 GiB is free"
        trace = f'Traceback (most recent call last):\n  File "training_code.py", line 57, in <module>\n    main()\n{error}'
        failure = {"node": "node3", "rank": 7, "local_rank": 1, "world": "w3", "exit_code": 1, "error": error, "step": last}
        yield Event(wire.FAILURE, {**failure, "traceback": trace, "permanent": True}, now)
        yield Event(wire.VERDICT, {"status": "failed", "why": f"node3 rank 7: {error}", "exit_code": 1}, now + 0.4)


_SLOW = "rank 7 on node3 makes the others wait: its steps take 31 % longer, in loading data"


def _joined(node: str, at: float) -> Event:
    number = int(node[-1])
    return Event(wire.JOINED, {"node": node, "host": f"c{number}", "address": f"10.0.1.{10 + number}", "interface": "eth0", "slots": 2}, at)


def _report(node: str, at: float) -> Event:
    versions = {"torch": "2.13.0+cu130", "nccl": "2.29.7", "driver": "580.95.05" if node != "node3" else "575.57.08", "python": "3.11.14"}
    facts = {"versions": versions, "devices": "2 × NVIDIA A100-SXM4-80GB", "git": {"commit": "4be1c09", "changed": "no"}}
    return Event(wire.REPORT, {"node": node, "parameters": "1,283,457,024", **facts}, at)


def _world(number: int, nodes: int, at: float) -> Event:
    ranks = {f"node{node}": [2 * node, 2 * node + 1] for node in range(nodes)}
    return Event(wire.WORLD, {"world": f"w{number}", "world_size": 2 * nodes, "nodes": nodes, "ranks": ranks}, at)


def _steps(chance: random.Random, first: int, last: int, at: float, nodes: int) -> Iterator[Event]:
    each = 1.15 * 3 / nodes if nodes > 3 else 1.15
    for step in range(first, last + 1):
        at += each
        loss = 2.9 + 7.9 * math.exp(-step / 160) + 0.6 * math.exp(-step / 700) + chance.gauss(0, 0.05)
        speed = 131072 / each * chance.gauss(1, 0.015)
        rate = 3e-4 * min(step / 60, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        yield Event(
            wire.PROGRESS,
            {
                "step": step,
                "steps": STEPS,
                "loss": loss,
                "learning_rate": rate,
                "tokens_per_second": speed,
                "eta_seconds": (STEPS - step) * each,
                "gradient_norm": abs(chance.gauss(0.9, 0.12)) + 5 * math.exp(-step / 30) + (4 if step % 311 == 0 else 0),
                "tflops": speed * 7.7e9 / 1e12,
                "mfu": speed * 7.7e9 / (nodes * 2 * 312e12),
                "parts": {name: seconds * chance.gauss(1, 0.05) for name, seconds in PARTS.items()},
                "memory": {"allocated": 51 * GIB, "reserved": 63 * GIB, "peak": 61.5 * GIB, "total": 80 * GIB, "host": 21 * GIB},
                "metrics": {"accuracy": 0.42 * (1 - math.exp(-step / 300)) + chance.gauss(0, 0.004)},
            },
            at,
        )
        if step % 100 == 0:
            path = f"runs/demo/step-{step:08d}"
            yield Event(wire.CHECKPOINT, {"step": step, "path": path, "seconds": chance.uniform(2.1, 3.4)}, at + 0.3)
            yield Event(wire.EVALUATION, {"step": step, "loss": loss + 0.08}, at + 0.4)


def _used(chance: random.Random, node: str) -> dict[str, object]:
    gpus = [
        {
            "use": chance.randint(94, 99),
            "memory": 64 * GIB,
            "memory_total": 80 * GIB,
            "temperature": 91 if (node, number) == ("node2", 1) else chance.randint(61, 72),
            "power": chance.randint(340, 395),
        }
        for number in range(2)
    ]
    return {"cpu": chance.uniform(9, 14), "cpus": 32.0, "memory": 61 * GIB, "memory_limit": 256 * GIB, "gpus": gpus}


def tasks(state: str = "running") -> list[TaskState]:
    """Return how the nodes stand."""
    return [*(TaskState(node, host, state) for node, host in HOSTS.items()), TaskState(wire.RENDEZVOUS, "gpu-1", "running")]


def lines(end: float) -> list[LogLine]:
    """Return what ranks have printed, oldest first, the last line at `end`."""
    found = []
    for step in range(0, 1010, 10):
        at = end - (1010 - step) * 0.9
        found.append(LogLine("node0", f"step {step:>4}/1200  loss {2.9 + 7.9 * math.exp(-step / 160):.4f}  lr 2.9e-04", 0, at))
        if step % 100 == 0:
            found += [LogLine(node, f"loader: shard {step // 100} of 64 is open", 2 * int(node[-1]), at + 0.1) for node in HOSTS]
    trouble = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB"]
    return [*found, *(LogLine("node3", text, 7, end - 0.2) for text in trouble), LogLine("node3", '<b id="planted">markup</b>', 7, end)]
