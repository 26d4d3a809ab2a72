"""Interrupted and taken up again, in the same world or another, a run is the run that was never touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worlds import ROOT, TIMEOUT, World, audit, changed, held_out, losses, manifest, samples_by_step, steps_saved, train

from swarmtrain.wire import EXIT_PLANNED

LONG = {"train_iterations": 60, "save_interval": 20}


@pytest.fixture(scope="module")
def config(config: dict[str, Any]) -> dict[str, Any]:
    """Four micro batches a step: two ranks have two each, of three one has more, and of four each has one."""
    return changed(config, topology={"micro_batch_size": 3})


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Path:
    """A run of 60 steps on three ranks that nobody disturbed."""
    folder = tmp_path_factory.mktemp("untouched")
    train(folder, changed(config, trainer=LONG), 3)
    return folder


@pytest.mark.parametrize(("size", "tensor", "precision"), [(1, 1, "float32"), (4, 2, "float32"), (3, 1, "bfloat16")])
def test_same_topology_bit_for_bit(tmp_path: Path, config: dict[str, Any], size: int, tensor: int, precision: str) -> None:
    base = changed(config, topology={"model_parallel_size": tensor}, trainer={"eval_interval": 4})
    base = changed(base, transformer_architecture={"precision": precision, "dropout_attention_probs": 0.1, "dropout_after_mlp": 0.1})
    once = train(tmp_path / "once", base, size)
    train(tmp_path / "twice", changed(base, trainer={"train_iterations": 6}), size)
    twice = train(tmp_path / "twice", base, size)
    assert twice == once
    assert set(held_out(tmp_path / "once")) == {0, 4, 8, 12}
    assert held_out(tmp_path / "twice").items() >= held_out(tmp_path / "once").items()
    # The files hold parameters and optimizer state: equal hashes mean equal bits.
    assert manifest(tmp_path / "twice", 12)["files"] == manifest(tmp_path / "once", 12)["files"]


@pytest.mark.parametrize("asked", [[0], [0, 1, 2]], ids=str)
def test_asked_to_leave(tmp_path: Path, config: dict[str, Any], untouched: Path, asked: list[int]) -> None:
    long = changed(config, trainer=LONG)
    world = World(tmp_path, long, 3)
    world.until(lambda: len(audit(tmp_path)) > 15)
    for rank in asked:
        world.send(rank, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 3, world.log()
    last = {max(line["step"] for line in audit(tmp_path) if line["rank"] == rank) for rank in range(3)}
    assert len(last) == 1, f"ranks left after different steps: {last}"
    step = last.pop()
    assert 5 <= step < 60
    assert steps_saved(tmp_path)[-1] == step
    assert train(tmp_path, long, 3) == losses(untouched)
    repeated = [line for line in audit(tmp_path) if line["step"] <= step and line["token"] > 1]
    assert not repeated, "no step is made twice"


def test_asked_to_leave_while_measuring(tmp_path: Path, config: dict[str, Any]) -> None:
    """A flag that is looked at only between steps would wait for the whole held-out loss."""
    endless = changed(config, trainer={"eval_iterations": 100_000}, topology={"global_batch_size": 2, "micro_batch_size": 2})
    endless["data"] = {**config["data"], "validation_data_prefixes": config["data"]["data_prefixes"] * 400}
    world = World(tmp_path, endless, 2)
    world.until((tmp_path / "run" / "metrics.jsonl").exists)
    world.send(1, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.log()
    assert steps_saved(tmp_path) == []
    assert held_out(tmp_path) == {}


def test_without_save_dir_leaves_at_once(tmp_path: Path, config: dict[str, Any]) -> None:
    world = World(tmp_path, changed(config, trainer={"train_iterations": 100_000, "save_dir": None}), 2)
    world.until(lambda: len(audit(tmp_path)) > 5)
    world.send(0, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.log()
    assert not (tmp_path / "run").exists()


def test_killed_rank(tmp_path: Path, config: dict[str, Any], untouched: Path) -> None:
    long = changed(config, trainer=LONG)
    world = World(tmp_path, long, 3)
    world.until(lambda: 20 in steps_saved(tmp_path))
    world.send(1, signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes, "a rank that lost a peer must not look finished"
    assert EXIT_PLANNED not in codes
    assert train(tmp_path, long, 3) == losses(untouched)


def test_killed_again_and_again(tmp_path: Path, config: dict[str, Any], untouched: Path) -> None:
    """Saving after every step, so that most of the kills fall into a save."""
    saving = changed(config, trainer={**LONG, "save_interval": 1, "keep_checkpoints": 2})
    random = Random(7)  # noqa: S311  # which rank to kill is no secret
    for goal in range(8, 56, 8):
        world = World(tmp_path, saving, 2)
        world.until(lambda: any(line["step"] >= goal for line in audit(tmp_path)))  # noqa: B023  # called before the loop goes on
        time.sleep(random.uniform(0, 0.05))
        world.send(random.choice([0, 1]), signal.SIGKILL)
        world.wait()
        assert len(steps_saved(tmp_path)) <= 3
    assert train(tmp_path, saving, 2) == losses(untouched)
    assert not list((tmp_path / "run").glob(".step-*")), "no litter"


@pytest.mark.test_all_only("starts torchrun, which starts ranks without a fork server")
def test_plain_torchrun_restarts_a_killed_rank(tmp_path: Path, config: dict[str, Any], untouched: Path) -> None:
    """torchrun --standalone keeps one store over all attempts: the second must not read the keys of the first."""
    (tmp_path / "config.yml").write_text(json.dumps(changed(config, trainer=LONG)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(
            [*command, str(ROOT / "training_code.py"), "config.yml"], cwd=tmp_path, env=environ, stdout=log, stderr=log
        )
        try:
            _wait_until(lambda: 20 in steps_saved(tmp_path) or agent.poll() is not None)
            os.kill(_children(agent.pid)[-1], signal.SIGKILL)
            assert agent.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
        finally:
            agent.terminate()  # killed, it would leave its ranks behind
            agent.wait(TIMEOUT)
    assert losses(tmp_path) == losses(untouched)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_scaled_up_and_down(tmp_path: Path, config: dict[str, Any], untouched: Path) -> None:
    """2 → 4 → 3 ranks by planned exits: the same losses, no step lost, none made twice, and the very samples in every step."""
    long = changed(config, trainer=LONG)
    for size in (2, 4):
        world = World(tmp_path, long, size)
        seen = len(audit(tmp_path))
        world.until(lambda: len(audit(tmp_path)) > seen + 5 * size)  # noqa: B023  # called before the loop goes on
        world.send(size - 1, signal.SIGTERM)
        assert world.wait() == [EXIT_PLANNED] * size, world.log()
    assert train(tmp_path, long, 3) == losses(untouched)
    seen = samples_by_step(tmp_path)
    assert seen == samples_by_step(untouched)
    times = Counter(sample for ids in seen.values() for sample in ids).values()
    assert max(times) - min(times) == 1, "three epochs and a part of one: nothing twice in an epoch, nothing skipped"
    made = [(line["step"], line["token"]) for line in audit(tmp_path) if line["rank"] == 0]
    assert [step for step, _ in sorted(made)] == list(range(1, 61))
    assert {token for _, token in made} == {1, 2, 3}


def test_finished_run_stays_finished(tmp_path: Path, config: dict[str, Any]) -> None:
    first = train(tmp_path, config)
    hashes = manifest(tmp_path, 12)["files"]
    assert train(tmp_path, config) == first
    assert manifest(tmp_path, 12)["files"] == hashes
    assert len(audit(tmp_path)) == 12


def test_starts_from_another_runs_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    once = train(tmp_path / "once", config)
    train(tmp_path / "old", changed(config, trainer={"train_iterations": 6}))
    rest = train(tmp_path / "new", changed(config, trainer={"load_dir": str(tmp_path / "old" / "run")}))
    assert rest == {step: loss for step, loss in once.items() if step > 6}
