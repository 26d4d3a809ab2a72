"""A run that is interrupted and resumed, in the same world or another, equals an uninterrupted run."""

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
from worlds import (
    ROOT,
    TIMEOUT_SECONDS,
    LocalWorld,
    list_saved_steps,
    merge_config,
    read_audit,
    read_losses,
    read_manifest,
    read_samples_by_step,
    read_validation_losses,
    run_training,
)

from swarmtrain.protocol import EXIT_PLANNED

LONG = {"train_iterations": 60, "save_interval": 20}


@pytest.fixture(scope="module")
def config(config: dict[str, Any]) -> dict[str, Any]:
    """Four micro batches per step: two ranks have two each, one of three ranks has more, and four ranks have one each."""
    return merge_config(config, topology={"micro_batch_size": 3})


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Path:
    """An undisturbed run of 60 steps on three ranks."""
    folder = tmp_path_factory.mktemp("untouched")
    run_training(folder, merge_config(config, trainer=LONG), 3)
    return folder


@pytest.mark.parametrize(("size", "tensor", "precision"), [(1, 1, "float32"), (4, 2, "float32"), (3, 1, "bfloat16")])
def test_same_topology_bit_for_bit(tmp_path: Path, config: dict[str, Any], size: int, tensor: int, precision: str) -> None:
    base = merge_config(config, topology={"model_parallel_size": tensor}, trainer={"eval_interval": 4})
    base = merge_config(base, transformer_architecture={"precision": precision, "dropout_attention_probs": 0.1, "dropout_after_mlp": 0.1})
    once = run_training(tmp_path / "once", base, size)
    run_training(tmp_path / "twice", merge_config(base, trainer={"train_iterations": 6}), size)
    twice = run_training(tmp_path / "twice", base, size)
    assert twice == once
    assert set(read_validation_losses(tmp_path / "once")) == {0, 4, 8, 12}
    assert read_validation_losses(tmp_path / "twice").items() >= read_validation_losses(tmp_path / "once").items()
    # The files hold parameters and optimizer state: equal hashes mean equal bits.
    assert read_manifest(tmp_path / "twice", 12)["files"] == read_manifest(tmp_path / "once", 12)["files"]


@pytest.mark.parametrize("signaled_ranks", [[0], [0, 1, 2]], ids=str)
def test_a_stop_is_requested(tmp_path: Path, config: dict[str, Any], undisturbed_run: Path, signaled_ranks: list[int]) -> None:
    long = merge_config(config, trainer=LONG)
    world = LocalWorld(tmp_path, long, 3)
    world.wait_until(lambda: len(read_audit(tmp_path)) > 15)
    for rank in signaled_ranks:
        world.send_signal(rank, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 3, world.read_log()
    last = {max(line["step"] for line in read_audit(tmp_path) if line["rank"] == rank) for rank in range(3)}
    assert len(last) == 1, f"ranks left after different steps: {last}"
    step = last.pop()
    assert 5 <= step < 60
    assert list_saved_steps(tmp_path)[-1] == step
    assert run_training(tmp_path, long, 3) == read_losses(undisturbed_run)
    repeated = [line for line in read_audit(tmp_path) if line["step"] <= step and line["generation"] > 1]
    assert not repeated, "no step is made twice"


def test_a_stop_is_requested_during_validation(tmp_path: Path, config: dict[str, Any]) -> None:
    """A flag that is checked only between steps would wait for the entire validation."""
    endless = merge_config(config, trainer={"eval_iterations": 100_000}, topology={"global_batch_size": 2, "micro_batch_size": 2})
    endless["data"] = {**config["data"], "validation_data_prefixes": config["data"]["data_prefixes"] * 400}
    world = LocalWorld(tmp_path, endless, 2)
    world.wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    world.send_signal(1, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert list_saved_steps(tmp_path) == []
    assert read_validation_losses(tmp_path) == {}


def test_without_save_dir_it_exits_at_once(tmp_path: Path, config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(config, trainer={"train_iterations": 100_000, "save_dir": None}), 2)
    world.wait_until(lambda: len(read_audit(tmp_path)) > 5)
    world.send_signal(0, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert not (tmp_path / "run").exists()


def test_killed_rank(tmp_path: Path, config: dict[str, Any], undisturbed_run: Path) -> None:
    long = merge_config(config, trainer=LONG)
    world = LocalWorld(tmp_path, long, 3)
    world.wait_until(lambda: 20 in list_saved_steps(tmp_path))
    world.send_signal(1, signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes, "a rank that lost a peer must not look finished"
    assert EXIT_PLANNED not in codes
    assert run_training(tmp_path, long, 3) == read_losses(undisturbed_run)


def test_killed_again_and_again(tmp_path: Path, config: dict[str, Any], undisturbed_run: Path) -> None:
    """Saving after every step, so that most kills hit a save."""
    saving = merge_config(config, trainer={**LONG, "save_interval": 1, "keep_checkpoints": 2})
    random = Random(7)  # noqa: S311  # which rank to kill is not a secret
    for goal in range(8, 56, 8):
        world = LocalWorld(tmp_path, saving, 2)
        world.wait_until(lambda: any(line["step"] >= goal for line in read_audit(tmp_path)))  # noqa: B023  # called within its iteration
        time.sleep(random.uniform(0, 0.05))
        world.send_signal(random.choice([0, 1]), signal.SIGKILL)
        world.wait()
        assert len(list_saved_steps(tmp_path)) <= 3
    assert run_training(tmp_path, saving, 2) == read_losses(undisturbed_run)
    assert not list((tmp_path / "run").glob(".step-*")), "no litter"


@pytest.mark.test_all_only("starts torchrun, which starts ranks without a fork server")
def test_plain_torchrun_restarts_a_killed_rank(tmp_path: Path, config: dict[str, Any], undisturbed_run: Path) -> None:
    """torchrun --standalone keeps one store over all attempts: the second must not read the keys of the first."""
    (tmp_path / "config.yml").write_text(json.dumps(merge_config(config, trainer=LONG)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(
            [*command, str(ROOT / "training_code.py"), "config.yml"], cwd=tmp_path, env=environ, stdout=log, stderr=log
        )
        try:
            _wait_until(lambda: 20 in list_saved_steps(tmp_path) or agent.poll() is not None)
            os.kill(_list_children(agent.pid)[-1], signal.SIGKILL)
            assert agent.wait(TIMEOUT_SECONDS) == 0, (tmp_path / "log").read_text()
        finally:
            agent.terminate()  # SIGKILL would leave its ranks behind
            agent.wait(TIMEOUT_SECONDS)
    assert read_losses(tmp_path) == read_losses(undisturbed_run)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_scaled_up_and_down(tmp_path: Path, config: dict[str, Any], undisturbed_run: Path) -> None:
    """2 → 4 → 3 ranks by planned exits: the same losses, no step lost or recomputed, and the same samples in every step."""
    long = merge_config(config, trainer=LONG)
    for size in (2, 4):
        world = LocalWorld(tmp_path, long, size)
        seen = len(read_audit(tmp_path))
        world.wait_until(lambda: len(read_audit(tmp_path)) > seen + 5 * size)  # noqa: B023  # called within its iteration
        world.send_signal(size - 1, signal.SIGTERM)
        assert world.wait() == [EXIT_PLANNED] * size, world.read_log()
    assert run_training(tmp_path, long, 3) == read_losses(undisturbed_run)
    seen = read_samples_by_step(tmp_path)
    assert seen == read_samples_by_step(undisturbed_run)
    times = Counter(sample for ids in seen.values() for sample in ids).values()
    assert max(times) - min(times) == 1, "three epochs and a part of one: nothing twice in an epoch, nothing skipped"
    made = [(line["step"], line["generation"]) for line in read_audit(tmp_path) if line["rank"] == 0]
    assert [step for step, _ in sorted(made)] == list(range(1, 61))
    assert {token for _, token in made} == {1, 2, 3}


def test_finished_run_stays_finished(tmp_path: Path, config: dict[str, Any]) -> None:
    first = run_training(tmp_path, config)
    hashes = read_manifest(tmp_path, 12)["files"]
    assert run_training(tmp_path, config) == first
    assert read_manifest(tmp_path, 12)["files"] == hashes
    assert len(read_audit(tmp_path)) == 12


def test_starts_from_another_runs_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    once = run_training(tmp_path / "once", config)
    run_training(tmp_path / "old", merge_config(config, trainer={"train_iterations": 6}))
    rest = run_training(tmp_path / "new", merge_config(config, trainer={"load_dir": str(tmp_path / "old" / "run")}))
    assert rest == {step: loss for step, loss in once.items() if step > 6}
