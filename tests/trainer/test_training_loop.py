"""The loop of training_code.py: an earlier script trains the same, a wrong loop is refused, and a resume names what has changed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from test_custom_loop import collect_batches
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import LocalWorld, list_saved_steps, merge_config, read_losses, read_validation_losses, run_training

import swarmtrain.trainer
from swarmtrain.config import Config
from swarmtrain.config.learning_rate_schedule import describe_learning_rate_change
from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer import Optimizer, Run, Transformer, open_data, parallelize
from swarmtrain.trainer.custom.script_loop import GradientAccumulation
from swarmtrain.trainer.data.samples import GlobalBatch


@pytest.mark.parametrize("size", [1, 2])
def test_an_earlier_training_script_trains_the_same(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    """The script of an earlier version calls train_model(), and is unchanged."""
    config = merge_config(config, trainer={"eval_interval": 5})
    losses = run_training(tmp_path / "current", config, size)
    world = LocalWorld(tmp_path / "earlier", config, size, script="earlier_training_code")
    assert world.wait() == [0] * size, world.read_log()
    assert read_losses(tmp_path / "earlier") == losses
    assert read_validation_losses(tmp_path / "earlier") == read_validation_losses(tmp_path / "current")


def prepare_run(run: Run) -> Any:
    """Prepare the training of the config's model, and return its data."""
    config = run.runtime.config
    data, _ = open_data(config)
    model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), run.runtime, initialize=False)
    run.prepare_training(model, Optimizer(model, config), data)
    return data


@pytest.mark.usefixtures("_single_process")
def test_a_loop_without_an_update_is_refused(config: dict[str, Any]) -> None:
    with swarmtrain.trainer.run(Config.from_json(json.dumps(config))) as run:
        steps = run.steps(prepare_run(run))
        run.forward_backward(next(steps))
        run.save_if_due()
        assert not run.stop_requested
        with pytest.raises(TrainingError, match=r"the loop lacks `result = run\.optimizer_step\(gradients\)`"):
            next(steps)


@pytest.mark.usefixtures("_single_process")
def test_batches_and_data_that_are_not_those_of_the_run_are_refused(config: dict[str, Any]) -> None:
    with swarmtrain.trainer.run(Config.from_json(json.dumps(config))) as run:
        data = prepare_run(run)
        with pytest.raises(TrainingError, match=r"steps: trains on the data of prepare_training\(\)"):
            next(iter(run.steps(open_data(run.runtime.config)[0])))
        batch = next(iter(run.steps(data)))
        with pytest.raises(TrainingError, match=r"the batch of step 1: has 11 samples, but topology\.global_batch_size is 12"):
            run.forward_backward(GlobalBatch(batch.ids[:-1], batch.loss_tokens, batch.loss_denominator))
        with pytest.raises(TrainingError, match="prepare_training: was called a second time"):
            prepare_run(run)
    with swarmtrain.trainer.run() as run, pytest.raises(TrainingError, match="forward_backward: needs a parallel model"):
        run.forward_backward(batch)


@pytest.mark.usefixtures("_single_process")
def test_a_script_logs_metrics_of_its_own_with_those_of_the_step(config: dict[str, Any]) -> None:
    with swarmtrain.trainer.run(Config.from_json(json.dumps(config))) as run:
        for batch in run.steps(prepare_run(run)):
            run.log_step(run.optimizer_step(run.forward_backward(batch)), answer=run.step / 2)
            run.save_if_due()
            assert not run.stop_requested
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["answer"]) for line in lines] == [(step, step / 2) for step in range(1, 13)]
    assert all("gradient_norm" in line for line in lines)


def test_a_resume_names_what_has_changed(tmp_path: Path, config: dict[str, Any]) -> None:
    config = merge_config(config, learning_rate_scheduler={"learning_rate_decay_iters": None})
    run_training(tmp_path, merge_config(config, runner={"env": {"OWN_KEY": "hush-1"}}))
    changed = merge_config(config, trainer={"train_iterations": 24}, optimizer={"beta1": 0.8}, runner={"env": {"OWN_KEY": "hush-2"}})
    run_training(tmp_path, changed)
    log = (tmp_path / "rank-0.log").read_text()
    for change in (
        "config.optimizer.beta1 is 0.9 in the checkpoint and 0.8 in the config",
        "config.trainer.train_iterations is 12 in the checkpoint and 24 in the config",
        "the learning rate of step 13 is 0.005 instead of 0, since trainer.train_iterations is 24 instead of 12",
    ):
        assert f"step-00000012: {change}\n" in log
    assert "has changed since the checkpoint" not in log, "the script is the same"
    assert "step-00000012: config.runner.env.OWN_KEY has changed\n" in log
    assert "hush" not in log


def test_the_learning_rate_of_a_longer_training() -> None:
    short, long = (Config.from_json(json.dumps({"trainer": {"train_iterations": steps}})) for steps in (100, 200))
    assert describe_learning_rate_change(short, short, 100) == ""
    expected = "the learning rate of step 100 is 0.0005 instead of 0, since trainer.train_iterations is 200 instead of 100"
    assert describe_learning_rate_change(short, long, 100) == expected


@pytest.mark.usefixtures("_single_process")
def test_another_seed_is_refused_unless_another_run_starts_from_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    def train(steps: int, **trainer: Any) -> int:
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
        return len(collect_batches({"save_dir": "run", **trainer}, loader, {"model": nn.Linear(1, 1)}, max_steps=steps))

    assert train(3, seed=1) == 3
    with pytest.raises(IncompatibleCheckpoint, match=r"was trained with trainer\.seed 1, but the config has 2"):
        train(7, seed=2)
    assert train(7, seed=2, save_dir="other", load_dir=["run"], load_context=True) == 4
    assert "config.trainer.seed is 1 in the checkpoint and 2 in the config" in capsys.readouterr().out


@pytest.mark.usefixtures("_single_process")
def test_the_environment_of_a_custom_script_is_reported() -> None:
    collect_batches({"save_dir": "run"}, [1.0], {"model": nn.Linear(3, 2)}, max_steps=1)
    report = json.loads(Path("run/report.json").read_text())
    assert (report["parameters"], len(report["ranks"]), "tokens_per_step" in report) == (8, 1, False)


def accumulate(folder: Path, micro_batches: int, *, stop_at: int = 0, zero: bool = False) -> tuple[list[int], int]:
    """Train with an optimizer step for each `micro_batches` batches. Return the saved steps, and the step at which a stop was agreed."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopped_step = 0
    with swarmtrain.trainer.run(trainer={"save_dir": str(folder), "save_interval": 2, "keep_checkpoints": 10}) as run:
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for batch in run.steps(torch.ones(10, 2), max_steps=9):
            model(batch).sum().backward()
            if run.step % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zero)
            run.save_if_due()
            run.save_if_due()  # a second call in a step is no request to save the next one
            if run.step == stop_at:
                signal.raise_signal(signal.SIGTERM)
            if run.stop_requested:
                stopped_step = run.step
                break
    return list_saved_steps(folder.parent), stopped_step


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("zero", [True, False])
def test_a_step_with_accumulated_gradients_is_not_saved(tmp_path: Path, zero: bool) -> None:
    """A checkpoint that is due is saved once the gradients are used; without accumulation, each second step is saved, and the last."""
    assert accumulate(tmp_path / "one" / "run", 1, zero=zero)[0] == [2, 4, 6, 8, 9]
    assert accumulate(tmp_path / "three" / "run", 3, zero=zero)[0] == [3, 6, 9]


@pytest.mark.usefixtures("_single_process")
def test_a_stop_waits_until_accumulated_gradients_are_used(tmp_path: Path) -> None:
    assert accumulate(tmp_path / "run", 3, stop_at=4)[1] == 6


def test_an_optimizer_that_other_losses_give_gradients_to_is_not_accumulating() -> None:
    """As in adversarial training: the second loss also has gradients for the model of the first, which made its step before."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    accumulation = GradientAccumulation(optimizers)
    for _ in range(2):
        accumulation.start_step()
        for optimizer in optimizers:
            optimizer.zero_grad()
            second(first(torch.ones(1, 1))).sum().backward()
            optimizer.step()
        assert not accumulation.has_unused_gradients()
    accumulation.start_step()
    assert accumulation.has_unused_gradients(), "the first model has gradients of the second loss that no step has used"
