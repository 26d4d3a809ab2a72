"""DiLoCo: the result depends on the number of learners, and not on the number of ranks that train them."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worlds import (
    LocalWorld,
    compute_deviation,
    list_saved_steps,
    merge_config,
    read_audit,
    read_gradient_norms,
    read_losses,
    read_manifest,
    read_samples_by_step,
    read_validation_losses,
    run_training,
)

from swarmtrain.trainer.inference import evaluation

INNER_STEPS, STEPS = 4, 14


@pytest.fixture(scope="module")
def diloco_config(config: dict[str, Any]) -> dict[str, Any]:
    """Four learners, three rounds of four steps, and an incomplete round. Dropout is on, and gradients are clipped."""
    return merge_config(
        config,
        topology={"global_batch_size": 16, "micro_batch_size": 2, "learners": 4},
        diloco={"inner_steps": INNER_STEPS, "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.5}},
        trainer={"train_iterations": STEPS, "eval_interval": 2, "save_interval": 3, "keep_checkpoints": 9},
        transformer_architecture={"dropout_after_mlp": 0.1},
    )


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory, diloco_config: dict[str, Any]) -> Path:
    """An undisturbed run of four learners on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_training(folder, diloco_config, 2)
    return folder


STREAMING = {"fragments": 2, "overlap": 1, "mixing": 0.5, "quantization": "int4"}


@pytest.mark.parametrize(
    ("learners", "exchange"),
    [
        pytest.param(2, {}, id="2-unquantized"),
        pytest.param(2, {"quantization": "int8"}, id="2-int8"),
        pytest.param(2, STREAMING, id="2-streaming int4", marks=pytest.mark.test_all_only("another number of learners, or exchange")),
        pytest.param(4, {}, id="4-unquantized", marks=pytest.mark.test_all_only("another number of learners, or exchange")),
        pytest.param(4, {"quantization": "int8"}, id="4-int8", marks=pytest.mark.test_all_only("another number of learners, or exchange")),
        pytest.param(4, STREAMING, id="4-streaming int4"),
    ],
)
def test_learners_on_any_number_of_ranks_are_one_process_bit_for_bit(
    tmp_path: Path, diloco_config: dict[str, Any], learners: int, exchange: dict[str, Any]
) -> None:
    """On 3 ranks, one rank has two of four learners; on 4 ranks, each of two learners is data parallel."""
    base = merge_config(diloco_config, topology={"learners": learners}, diloco=exchange)
    one = run_training(tmp_path / "1", base)
    for size in (2, 3, 4) if learners == 4 else (2, 4):
        folder = tmp_path / str(size)
        assert run_training(folder, base, size) == one
        assert read_validation_losses(folder) == read_validation_losses(tmp_path / "1")
        assert read_gradient_norms(folder) == read_gradient_norms(tmp_path / "1")
        assert read_samples_by_step(folder) == read_samples_by_step(tmp_path / "1")
    assert one[STEPS] < 0.9 * one[1], "a model that learns nothing is equal to anything"


@pytest.mark.parametrize("method", [pytest.param("sgd", marks=pytest.mark.test_all_only("one more optimizer")), "muon"])
def test_learners_with_other_inner_optimizers_and_precisions(tmp_path: Path, diloco_config: dict[str, Any], method: str) -> None:
    """In bfloat16, and with int4: each rank casts its weights from the parameters of the learner that it trains."""
    base = merge_config(
        diloco_config,
        topology={"learners": 2},
        optimizer={"method": method},
        diloco={"quantization": "int4"},
        transformer_architecture={"precision": "bfloat16"},
    )
    assert run_training(tmp_path / "2", base, 2) == run_training(tmp_path / "1", base)


def test_tensor_parallel_learners_equal_one_process(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    base = merge_config(diloco_config, topology={"learners": 2})
    one = run_training(tmp_path / "1", base)
    divided = run_training(tmp_path / "4", merge_config(base, topology={"model_parallel_size": 2}), 4)
    assert compute_deviation(one, divided) < 1e-6
    assert compute_deviation(read_validation_losses(tmp_path / "1"), read_validation_losses(tmp_path / "4")) < 1e-6


SHARDED = {
    "fsdp": {"topology": {"data_parallel_type": "fsdp"}},
    "zero": {"optimizer": {"zero": True}},
    "hsdp": {"topology": {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2}},
}


@pytest.mark.parametrize(
    ("sharding", "quantization"),
    [
        pytest.param(*case, marks=() if case in (("fsdp", "int4"), ("hsdp", "none")) else pytest.mark.test_all_only("other ways to shard"))
        for case in itertools.product(SHARDED, ["none", "int4"])
    ],
)
def test_sharded_learners_equal_one_process(tmp_path: Path, diloco_config: dict[str, Any], sharding: str, quantization: str) -> None:
    """Two learners of two ranks that shard its state, and of one rank each. FSDP with one learner shards it over all four ranks."""
    base = merge_config(diloco_config, topology={"learners": 2}, diloco={"quantization": quantization})
    one = run_training(tmp_path / "1", base)
    for size in (2, 4) if sharding != "hsdp" else (4,):
        folder = tmp_path / str(size)
        divided = run_training(folder, merge_config(base, **SHARDED[sharding]), size)
        assert compute_deviation(one, divided) < 1e-6
        assert compute_deviation(read_validation_losses(tmp_path / "1"), read_validation_losses(folder)) < 1e-6


def test_sharded_learners_are_resumed_on_another_number_of_ranks(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    """From a checkpoint within an exchange: from four ranks to two and one, which have several learners."""
    sharded = merge_config(diloco_config, topology={"learners": 2, "data_parallel_type": "fsdp"}, diloco=STREAMING)
    once = run_training(tmp_path / "4", sharded, 4)
    for size in (4, 2, 1):
        copy_run(tmp_path / "4", tmp_path / f"resumed{size}", last_step=6)
        resumed = run_training(tmp_path / f"resumed{size}", sharded, size)
        assert resumed == once if size == 4 else compute_deviation(once, resumed) < 1e-6


def test_a_resume_of_learners_is_bit_equal(tmp_path: Path, diloco_config: dict[str, Any], run_of_two: Path) -> None:
    """From a checkpoint within a round. The files hold the parameters and optimizer state of all learners: equal hashes, equal bits."""
    copy_run(run_of_two, tmp_path, last_step=6)
    assert run_training(tmp_path, diloco_config, 2) == read_losses(run_of_two)
    assert read_validation_losses(tmp_path) == read_validation_losses(run_of_two)
    assert read_manifest(tmp_path, STEPS)["files"] == read_manifest(run_of_two, STEPS)["files"]
    assert {line["step"] for line in read_audit(tmp_path)} == set(range(7, STEPS + 1)), "no step is made twice"


def test_learners_move_between_ranks_when_a_run_is_scaled(tmp_path: Path, diloco_config: dict[str, Any], run_of_two: Path) -> None:
    """From 2 ranks to 1 and back to 2."""
    copy_run(run_of_two, tmp_path / "down", last_step=3)
    assert run_training(tmp_path / "down", diloco_config, 1) == read_losses(run_of_two)
    copy_run(tmp_path / "down", tmp_path / "up", last_step=9)
    assert run_training(tmp_path / "up", diloco_config, 2) == read_losses(run_of_two)
    assert read_validation_losses(tmp_path / "up") == read_validation_losses(run_of_two)
    assert read_manifest(tmp_path / "up", STEPS)["files"] == read_manifest(run_of_two, STEPS)["files"]


def test_fragments_in_flight_are_resumed_on_another_number_of_ranks(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    """After step 6, an exchange has started and not ended."""
    streaming = merge_config(diloco_config, diloco=STREAMING)
    once = run_training(tmp_path / "once", streaming, 2)
    for size in (1, 2):
        copy_run(tmp_path / "once", tmp_path / str(size), last_step=6)
        assert run_training(tmp_path / str(size), streaming, size) == once
        assert read_validation_losses(tmp_path / str(size)) == read_validation_losses(tmp_path / "once")
    assert read_manifest(tmp_path / "2", STEPS)["files"] == read_manifest(tmp_path / "once", STEPS)["files"]


def test_a_killed_learner_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, diloco_config: dict[str, Any], run_of_two: Path
) -> None:
    """Without a second rank that has its state. The result is that of an undisturbed run."""
    world = LocalWorld(tmp_path, diloco_config, 2)
    world.wait_until(lambda: 3 in list_saved_steps(tmp_path))
    world.send_signal(1, signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes
    assert run_training(tmp_path, diloco_config, 2) == read_losses(run_of_two)


@pytest.mark.test_all_only("kills four worlds; tests/entrypoint kills learners of a run")
def test_learners_that_are_killed_again_and_again_change_nothing(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    """Saving after every step, with exchanges in flight for half of the steps, so that kills hit rounds, exchanges and saves."""
    streaming = merge_config(diloco_config, diloco=STREAMING, trainer={"train_iterations": 40, "save_interval": 1, "eval_interval": None})
    undisturbed = run_training(tmp_path / "undisturbed", streaming)
    random, folder = Random(3), tmp_path / "killed"  # noqa: S311  # which rank to kill is not a secret
    for goal in range(6, 36, 6):
        world = LocalWorld(folder, streaming, 2)
        world.wait_until(lambda: any(line["step"] >= goal for line in read_audit(folder)))  # noqa: B023  # called within its iteration
        time.sleep(random.uniform(0, 0.1))
        world.send_signal(random.choice([0, 1]), signal.SIGKILL)
        world.wait()
    assert run_training(folder, streaming, 2) == undisturbed


def test_learners_read_disjoint_samples(tmp_path: Path, diloco_config: dict[str, Any], run_of_two: Path) -> None:
    """Learner i reads part i of the batch that a run without learners would read; the first two are on the first of two ranks."""
    run_training(tmp_path, merge_config(diloco_config, topology={"learners": None}, diloco={"inner_steps": 100, "outer_optimizer": {}}))
    whole = {line["step"]: line["samples"] for line in read_audit(tmp_path)}
    by_rank = {(line["step"], line["rank"]): line["samples"] for line in read_audit(run_of_two)}
    for step, samples in whole.items():
        assert len(set(samples)) == 16
        assert by_rank[step, 0] + by_rank[step, 1] == samples


def test_validation_uses_the_global_parameters(run_of_two: Path) -> None:
    """They change after each round, and after the last step of the run, and not within a round."""
    losses = read_validation_losses(run_of_two)
    assert losses.keys() == set(range(0, STEPS + 1, 2))
    assert losses[0] == losses[2] != losses[4] == losses[6] != losses[8] == losses[10] != losses[12] != losses[14]


@pytest.mark.usefixtures("_single_process")
def test_a_checkpoint_is_evaluated_with_the_global_parameters(
    diloco_config: dict[str, Any], run_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"tasks": [], "num_fewshot": None, "limit": None, "task_files": None, "batch_size": 3, "tokenizer": "bytes", "json": True}
    assert evaluation.main({"config": json.dumps(diloco_config), "model": str(run_of_two / "run"), **options}) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["step"] == STEPS
    assert result["loss"] == pytest.approx(read_validation_losses(run_of_two)[STEPS], abs=1e-4)


def test_a_checkpoint_has_the_state_of_each_learner_once(run_of_two: Path) -> None:
    manifest = read_manifest(run_of_two, STEPS)
    kinds = {name.rpartition("/")[0] for name in manifest["tensors"]}
    of_learners = {f"optimizer/learner{index}.{kind}" for index in range(4) for kind in ("parameters", "exp_avg", "exp_avg_sq")}
    assert kinds == {"model", "optimizer/outer_momentum", "optimizer/outer_progress", *of_learners}
    assert {len(tensor["chunks"]) for tensor in manifest["tensors"].values()} == {1}
    assert manifest["topology"]["learners"] == 4


@pytest.mark.parametrize("learners", [None, 2])
def test_another_number_of_learners_is_refused(
    tmp_path: Path, diloco_config: dict[str, Any], run_of_two: Path, learners: int | None
) -> None:
    copy_run(run_of_two, tmp_path, last_step=3)
    diloco = diloco_config["diloco"] if learners else {"inner_steps": 100, "outer_optimizer": {}}
    world = LocalWorld(tmp_path, merge_config(diloco_config, topology={"learners": learners}, diloco=diloco), 1)
    assert world.wait() == [1]
    assert f"was trained with topology.learners 4, but the config has {learners or 'null'}" in world.read_log()


def test_one_learner_whose_changes_are_applied_unchanged_is_a_run_without_learners(tmp_path: Path, config: dict[str, Any]) -> None:
    """Outer learning rate 1 and momentum 0: the global parameters become those of the learner, up to rounding."""
    plain = run_training(tmp_path / "plain", config)
    outer = {"inner_steps": 3, "outer_optimizer": {"learning_rate": 1.0, "momentum": 0.0}}
    learner = run_training(tmp_path / "learner", merge_config(config, topology={"learners": 1}, diloco=outer))
    assert compute_deviation(plain, learner) < 1e-5
    assert compute_deviation(read_validation_losses(tmp_path / "plain"), read_validation_losses(tmp_path / "learner")) < 1e-5


@pytest.mark.test_all_only("two training runs; make bench has the learning curves")
def test_learners_reach_the_loss_of_data_parallelism(tmp_path: Path, config: dict[str, Any]) -> None:
    """Within 5 % at equal tokens on a small model, with two learners, int8 and 30 rounds of 10 steps: a check, not a learning curve."""
    base = merge_config(
        config,
        topology={"global_batch_size": 16, "micro_batch_size": 8},
        learning_rate_scheduler={"learning_rate_decay_iters": 300},
        trainer={"train_iterations": 300},
    )
    diloco = {"inner_steps": 10, "quantization": "int8", "outer_optimizer": {"learning_rate": 1.0, "momentum": 0.6}}
    run_training(tmp_path / "plain", base)
    run_training(tmp_path / "learners", merge_config(base, topology={"learners": 2}, diloco=diloco))
    plain, learners = (read_validation_losses(tmp_path / name) for name in ("plain", "learners"))
    assert plain[300] < 0.8 * plain[0], "a model that learns nothing is equal to anything"
    assert learners[300] < 1.05 * plain[300]


def test_more_replicas_than_learners_must_be_a_multiple(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(diloco_config, topology={"learners": 2}), 3)
    assert world.wait() == [1] * 3
    assert "3 replicas are more than learners 2, but not a multiple of them" in world.read_log()


def copy_run(source: Path, target: Path, *, last_step: int) -> None:
    """Copy the checkpoints and metrics of a run up to `last_step`, from which it is then resumed."""
    shutil.copytree(source / "run", target / "run")
    for step in list_saved_steps(target):
        if step > last_step:
            shutil.rmtree(target / "run" / f"step-{step:08}")
    assert list_saved_steps(target)[-1] == last_step
