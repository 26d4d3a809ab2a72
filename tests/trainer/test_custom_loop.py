"""A custom script with the five lines: it resumes in any world as if nothing had happened, and reports which line is missing."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from custom_loop import BATCH, EPOCHS, SAMPLES
from custom_shards import EPOCHS as SHARDS_EPOCHS
from custom_shards import SHARD_LENGTHS, build_batch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from worlds import LocalWorld, list_saved_steps, read_losses, read_manifest

import swarmtrain.trainer
from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.protocol import EXIT_PLANNED
from swarmtrain.trainer.custom.data_sharding import ShardedLoader
from swarmtrain.trainer.custom.user_state import flatten_state, unflatten_state

STEPS = EPOCHS * -(-SAMPLES // BATCH)


def run_loop(folder: Path, size: int, code: int = 0, **environ: str) -> LocalWorld:
    world = LocalWorld(folder, {}, size, environ, script="custom_loop")
    assert world.wait() == [code] * size, world.read_log()
    return world


def read_weights(folder: Path) -> list[Any]:
    values: list[Any] = json.loads((folder / "weights.json").read_text())
    return values


def read_samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, from the last time that the step ran."""
    samples: dict[int, dict[str, list[int]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            samples.setdefault(line["step"], {})[path.name] = line["ids"]
    return {step: sorted(sample for ids in by_rank.values() for sample in ids) for step, by_rank in samples.items()}


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_loop(folder, 2, DROPOUT="1")
    return folder


def test_each_sample_comes_once_an_epoch(undisturbed_run: Path) -> None:
    found = read_samples(undisturbed_run)
    assert sorted(found) == [*range(1, STEPS + 1)]
    per_epoch = STEPS // EPOCHS
    orders = [[found[step] for step in range(begun + 1, begun + per_epoch + 1)] for begun in range(0, STEPS, per_epoch)]
    assert [sorted(sample for step in epoch for sample in step) for epoch in orders] == [[*range(SAMPLES)]] * EPOCHS
    assert orders[0] != orders[1]


@pytest.mark.parametrize("environ", [{"KILL_STEP": "6"}, {"STOP_STEP": "6"}], ids=["a rank dies", "stop requested"])
def test_it_resumes_as_if_nothing_had_happened(tmp_path: Path, undisturbed_run: Path, environ: dict[str, str]) -> None:
    world = LocalWorld(tmp_path, {}, 2, {"DROPOUT": "1", **environ}, script="custom_loop")
    codes = world.wait()
    if "STOP_STEP" in environ:
        assert codes == [EXIT_PLANNED] * 2, world.read_log()
        assert list_saved_steps(tmp_path) == [4, 6]
    else:
        assert codes[1] == -signal.SIGKILL
    again = run_loop(tmp_path, 2, DROPOUT="1")
    assert f"resuming from step {6 if 'STOP_STEP' in environ else 4}" in again.read_log()
    assert read_weights(tmp_path) == read_weights(undisturbed_run)
    assert read_samples(tmp_path) == read_samples(undisturbed_run)
    assert read_losses(tmp_path) == read_losses(undisturbed_run)


@pytest.mark.parametrize("size", [1, 3])
def test_another_world_resumes_with_the_same_samples_and_losses(tmp_path: Path, size: int) -> None:
    """A step has 12 samples, the last of an epoch 8: of these, three ranks have 3, 3 and 2."""
    run_loop(tmp_path / "whole", 2)
    run_loop(tmp_path / "changed", 2, EXIT_PLANNED, STOP_STEP="5")
    world = run_loop(tmp_path / "changed", size)
    assert "resuming from step 5" in world.read_log()
    assert read_samples(tmp_path / "changed") == read_samples(tmp_path / "whole")
    whole, other = read_losses(tmp_path / "whole"), read_losses(tmp_path / "changed")
    assert other == pytest.approx(whole, rel=1e-5)
    assert run_loop(tmp_path / "changed", 1).read_log().count("the end") == size + 1, "a run that is done has nothing left to do"


def run_shards(folder: Path, code: int = 0, **environ: str) -> LocalWorld:
    world = LocalWorld(folder, {}, len(SHARD_LENGTHS), environ, script="custom_shards")
    assert world.wait() == [code] * len(SHARD_LENGTHS), world.read_log()
    return world


def read_batches(folder: Path) -> dict[tuple[int, int], tuple[int, int, float]]:
    """Return epoch, batch and weight by rank and step."""
    batches = {}
    for rank in range(len(SHARD_LENGTHS)):
        for line in map(json.loads, (folder / f"seen-{rank}.jsonl").read_text().splitlines()):
            batches[rank, line["step"]] = line["epoch"], line["name"], line["weight"]
    return batches


@pytest.fixture(scope="module")
def shards_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    run_shards(folder)
    return folder


def test_shards_of_unequal_lengths_are_read_to_the_end_of_the_longest(shards_run: Path) -> None:
    longest, size = max(SHARD_LENGTHS), len(SHARD_LENGTHS)
    wanted = {}
    for epoch in range(SHARDS_EPOCHS):
        for number in range(longest):
            having = sum(number < length for length in SHARD_LENGTHS)
            for rank, length in enumerate(SHARD_LENGTHS):
                name, weight = 10 * rank + min(number, length - 1), size / having if number < length else 0.0
                wanted[rank, epoch * longest + number + 1] = epoch, name, weight
    assert read_batches(shards_run) == wanted
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected_losses = {}
    for step in range(1, SHARDS_EPOCHS * longest + 1):
        number = (step - 1) % longest
        batches = [build_batch(rank, number) for rank, length in enumerate(SHARD_LENGTHS) if number < length]
        loss = (model(torch.cat(batches)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected_losses[step] = float(loss.detach())
    assert read_losses(shards_run) == pytest.approx(expected_losses, rel=1e-5), "the mean over what there is"


@pytest.mark.parametrize("step", [4, 5, 8])
def test_they_resume_where_some_have_nothing_left(shards_run: Path, tmp_path: Path, step: int) -> None:
    run_shards(tmp_path, EXIT_PLANNED, STOP_STEP=str(step))
    assert f"resuming from step {step}" in run_shards(tmp_path).read_log()
    assert read_batches(tmp_path) == read_batches(shards_run)
    assert read_weights(tmp_path) == read_weights(shards_run)


def test_random_augmentation_is_the_same_after_a_restart(shards_run: Path, tmp_path: Path) -> None:
    run_shards(tmp_path / "whole", AUGMENTED="1")
    run_shards(tmp_path / "again", EXIT_PLANNED, AUGMENTED="1", STOP_STEP="7")
    run_shards(tmp_path / "again", AUGMENTED="1")
    assert read_weights(tmp_path / "again") == read_weights(tmp_path / "whole") != read_weights(shards_run)


def test_an_empty_shard_is_reported(tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, {}, 3, {"LENGTHS": "[2, 0, 1]"}, script="custom_shards")
    assert all(world.wait())
    assert world.read_log().count("rank 1 has no batch, but other ranks have") >= 3


def test_the_manifest_of_its_checkpoint(undisturbed_run: Path) -> None:
    content = read_manifest(undisturbed_run, STEPS)
    assert content["tensors"]["model/0.weight"]["size"] == [16, 8], "without the names that DistributedDataParallel adds"
    assert content["state"]["data_layout"] == {"global_batch_size": BATCH, "sample_count": SAMPLES, "steps_per_epoch": STEPS // EPOCHS}
    assert not list(undisturbed_run.rglob("*.pt"))


def shard_epoch(
    samples: int, batch: int, size: int, *, shuffled: bool = True, drop_last: bool = False
) -> list[list[tuple[list[int], float]]]:
    """Return the samples and weights of each step of an epoch, by step and rank."""
    loader = DataLoader(list(range(samples)), batch_size=4, shuffle=shuffled, drop_last=drop_last)  # type: ignore[arg-type]
    ranks = [ShardedLoader(loader, rank, size, 5, batch) for rank in range(size)]
    steps_by_rank = [[(given.tolist(), weight) for given, weight in one.iterate_batches(0)] for one in ranks]
    return [list(step) for step in zip(*steps_by_rank, strict=True)]


@pytest.mark.parametrize(("samples", "batch", "size"), [(44, 12, 2), (44, 12, 3), (25, 12, 5), (7, 7, 7), (100, 9, 4), (13, 12, 4)])
def test_weights_make_the_mean_of_ranks_that_of_samples(samples: int, batch: int, size: int) -> None:
    values = torch.randn(samples, generator=torch.Generator().manual_seed(1)).double()
    steps = shard_epoch(samples, batch, size)
    assert len(steps) == -(-samples // batch)
    whole = shard_epoch(samples, batch, 1)
    for step, [(ids, one)] in zip(steps, whole, strict=True):
        assert one == 1
        assert sorted(sample for mine, weight in step if weight for sample in mine) == sorted(ids)
        assert sum(weight for _, weight in step) == pytest.approx(size)
        mean = sum(values[mine].mean() * weight for mine, weight in step) / size
        assert mean == pytest.approx(values[ids].mean())
    assert shard_epoch(samples, batch, 1, shuffled=False)[0] == [([*range(batch)], 1)]
    assert len(shard_epoch(samples, batch, size, drop_last=True)) == samples // batch


class NoisyDataset(Dataset[tuple[int, float, float, float]]):
    """A dataset with random augmentation of each sample, by three generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.random()), random.gauss(0, 1)

    def __len__(self) -> int:
        return 20


class BatchedNoisyDataset(NoisyDataset):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


def collect_noise(
    *, size: int = 1, workers: int = 0, completed_steps: int = 0, data: type[NoisyDataset] = NoisyDataset
) -> dict[int, list[float]]:
    """Return the random changes of each sample of the second epoch, after `completed_steps` of its steps."""
    changes_by_sample = {}
    for rank in range(size):
        loader = DataLoader(data(), batch_size=2, shuffle=True, num_workers=workers)
        for given, weight in ShardedLoader(loader, rank, size, 5, 6).iterate_batches(4 + completed_steps):
            rows = torch.stack([values.double() for values in given], 1).tolist()
            changes_by_sample.update({int(index): changes for index, *changes in rows if weight})
    return changes_by_sample


def test_random_augmentation_is_the_same_for_any_reader() -> None:
    whole = collect_noise()
    assert len({change for changes in whole.values() for change in changes}) == 3 * 20
    assert collect_noise(workers=2) == whole
    assert collect_noise(size=2) == whole
    assert collect_noise(size=3, workers=1) == whole
    later = collect_noise(completed_steps=2, workers=2)
    assert 0 < len(later) < 20
    assert later == {index: whole[index] for index in later}
    assert collect_noise(data=BatchedNoisyDataset, workers=2, completed_steps=2).items() <= collect_noise(data=BatchedNoisyDataset).items()


class CountingDataset(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def collect_batches(
    trainer: dict[str, Any], data: Any, objects: dict[str, Any], *, calls_save: bool = True, checks_stop: bool = True, **options: Any
) -> list[Any]:
    """Return the batches that a script gets, which may lack some of the lines."""
    batches = []
    with swarmtrain.trainer.run(trainer=trainer) as run:
        if objects:
            run.register_for_checkpointing(**objects)
        for batch in run.steps(data, **options):
            batches.append(batch)
            if calls_save:
                run.save_if_due()
            if checks_stop:
                assert not run.stop_requested
    return batches


def expect_refusal(match: str, data: Any = None, objects: dict[str, Any] | None = None, **options: Any) -> None:
    with pytest.raises(TrainingError, match=match):
        collect_batches({"save_dir": "run"}, data or [1, 2, 3], objects or {"model": nn.Linear(1, 1)}, **options)


@pytest.mark.usefixtures("_single_process")
def test_it_names_the_missing_line() -> None:
    def expect_missing_line(match: str, *, keep: bool = True, calls_save: bool = True, checks_stop: bool = True, **trainer: Any) -> None:
        with pytest.raises(TrainingError, match=match):
            collect_batches(trainer, [1, 2, 3], {"model": nn.Linear(1, 1)} if keep else {}, calls_save=calls_save, checks_stop=checks_stop)

    expect_missing_line(r"config trainer.save_dir: is not set, so no state can be saved")
    expect_missing_line(r"steps: no state is registered for checkpointing", keep=False, save_dir="a")
    expect_missing_line(r"the loop lacks `run.save_if_due\(\)`$", calls_save=False, save_dir="b")
    expect_missing_line(r"the loop lacks `if run.stop_requested: run.save_and_exit\(\)`$", checks_stop=False, save_dir="c")
    expect_missing_line(r"lacks `run.save_if_due\(\)` and `if run.stop_requested", calls_save=False, checks_stop=False, save_dir="d")


@pytest.mark.usefixtures("_single_process")
def test_what_cannot_be_saved_or_sharded() -> None:
    expect_refusal(r"model does not implement state_dict\(\)", objects={"model": 3})
    expect_refusal("model/f.*cannot be saved: function", objects={"model": UnserializableState()})
    expect_refusal("WeightedRandomSampler", DataLoader([1, 2], sampler=WeightedRandomSampler([1, 1], 2)))  # type: ignore[arg-type]
    expect_refusal("custom batch_sampler", DataLoader([1, 2], batch_sampler=[[0, 1]]))  # type: ignore[arg-type]
    expect_refusal("the data has no batches: it is empty or already exhausted", iter([1, 2, 3]), epochs=2)


class UnserializableState:
    def state_dict(self) -> Any:
        return {"f": lambda: None}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.usefixtures("_single_process")
def test_an_iterable_resumes_and_changes_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    def read(steps: int, keep_checkpoints: int = 3, **objects: Any) -> list[int]:
        data = DataLoader(CountingDataset(), batch_size=2)
        return [
            int(given[0])
            for given in collect_batches(
                {"save_dir": "run", "keep_checkpoints": keep_checkpoints}, data, objects or {"model": nn.Linear(1, 1)}, max_steps=steps
            )
        ]

    assert read(3) == [0, 2, 4]
    assert read(7, keep_checkpoints=7) == [6, 8, 0, 2]
    assert "config.trainer.keep_checkpoints is 3 in the checkpoint and 7 in the config" in capsys.readouterr().out
    assert read(7) == []
    with pytest.raises(IncompatibleCheckpoint, match="has model, but the script registers another"):
        read(8, another=nn.Linear(1, 1))
    with pytest.raises(IncompatibleCheckpoint, match=r"model does not accept the saved state: (.|\n)*size mismatch"):
        read(8, model=nn.Linear(2, 1))


@pytest.mark.usefixtures("_single_process")
def test_callbacks_run_in_order_and_the_end_callback_always_runs() -> None:
    calls: list[Any] = []

    def train() -> None:
        with swarmtrain.trainer.run(trainer={"save_dir": "run", "save_interval": 2}) as run:
            run.add_callback("end", lambda: calls.append("end"))
            run.add_callback("end", lambda: calls.remove("nothing"), priority=1)
            run.add_callback("step", lambda step: calls.append(f"late {step}"))
            run.add_callback("step", lambda step: calls.append(f"early {step}"), priority=5)
            run.add_callback("saved", lambda step, path: calls.append(f"{path.name} of {step}"))
            run.register_for_checkpointing(model=nn.Linear(1, 1))
            for number in run.steps([3, 2, 1, 0]):
                run.save_if_due()
                assert not run.stop_requested
                calls.append(6 // number)

    with pytest.raises(ZeroDivisionError):
        train()
    assert [each for each in calls if not str(each).startswith("step-")] == [
        2,
        "early 1",
        "late 1",
        3,
        "early 2",
        "late 2",
        6,
        "early 3",
        "late 3",
        "end",
    ]


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize(("mode", "expected_steps"), [("min", [2, 4, 7]), ("max", [1, 3, 7])])
def test_the_best_checkpoints_are_kept(tmp_path: Path, mode: str, expected_steps: list[int]) -> None:
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 2, "eval_interval": 1, "best_checkpoint_mode": mode}
    trainer = {"save_dir": "run", "save_interval": None, "save_in_background": False, **keeps}
    with swarmtrain.trainer.run(trainer=trainer) as run:
        run.register_for_checkpointing(model=nn.Linear(1, 1))
        for number in run.steps([5, 1, 4, 0.5, 3, 2, 9]):
            run.save_if_due(metric=number if run.step != 7 else None)
            assert not run.stop_requested
    assert list_saved_steps(tmp_path) == expected_steps
    assert read_manifest(tmp_path, 3 if 3 in expected_steps else 2)["validation_loss"] in (4, 1)


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("non_finite", ["nan", "inf", "-inf"])
def test_a_non_finite_metric_is_never_the_best(tmp_path: Path, mode: str, non_finite: str) -> None:
    """It may come before or after the best, and also be the first."""
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 1, "eval_interval": 1, "best_checkpoint_mode": mode}
    trainer = {"save_dir": "run", "save_interval": None, "save_in_background": False, **keeps}
    sign = 1 if mode == "min" else -1
    with swarmtrain.trainer.run(trainer=trainer) as run:
        run.register_for_checkpointing(model=nn.Linear(1, 1))
        for metric in run.steps([float(non_finite), 3 * sign, 1 * sign, float(non_finite), 2 * sign, 4 * sign]):
            run.save_if_due(metric=metric)
            assert not run.stop_requested
    assert list_saved_steps(tmp_path) == [3, 6]


def run_with_losses(folder: Path, losses: list[float], *, log: bool = True, save_interval: int = 3, **trainer: Any) -> None:
    """Train one step for each of `losses`, whose gradient is that of the loss, and log each if `log`."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"save_dir": str(folder / "run"), "save_interval": save_interval, **trainer}
    with swarmtrain.trainer.run(trainer=options, logger={"log_interval": 4, "log_dir": str(folder / "logs")}) as run:
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for value in run.steps(losses):
            optimizer.zero_grad()
            loss = model(torch.ones(1)).sum() * value
            loss.backward()
            optimizer.step()
            if log:
                run.log(loss=loss)
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()


def log_losses(*losses: float, **trainer: Any) -> None:
    with swarmtrain.trainer.run(trainer=trainer) as run:
        for loss in losses:
            run.log(loss=loss, other=float("nan"))


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("log", [True, False])
def test_a_run_whose_loss_is_not_finite_ends_and_saves_no_nan(tmp_path: Path, value: float, log: bool) -> None:
    with pytest.raises(TrainingError) as raised:
        run_with_losses(tmp_path, [1.0] * 4 + [value] + [1.0] * 20, log=log)
    assert raised.value.place in ("step 5", "step 6"), "found in the losses of steps 5 to 8, or when step 6 is saved"
    for thread in threading.enumerate():
        if thread.name == "checkpoint":  # the process would end after it
            thread.join()
    assert list_saved_steps(tmp_path) == [3]


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("steps", [1, 6])
def test_a_last_loss_that_is_not_finite_is_no_success(tmp_path: Path, steps: int) -> None:
    """Neither with checkpoints nor in a script that registers nothing."""
    with pytest.raises(TrainingError, match="not finite" if steps == 1 else "not"):
        run_with_losses(tmp_path / "saves", [1.0] * (steps - 1) + [float("nan")], save_interval=100)
    assert list_saved_steps(tmp_path / "saves") == []
    with pytest.raises(TrainingError, match="the loss is not finite"):
        log_losses(*[1.0] * (steps - 1), float("nan"))


@pytest.mark.usefixtures("_single_process")
def test_a_script_that_skips_steps_by_itself_may_log_some_losses_that_are_not_finite(tmp_path: Path) -> None:
    nan, skip = float("nan"), {"non_finite": "skip", "non_finite_steps": 3}
    log_losses(nan, nan, 1.0, nan, nan, **skip)
    with pytest.raises(TrainingError, match="for 3 logged steps in a row"):
        log_losses(1.0, nan, nan, nan, 1.0, **skip)
    with (
        pytest.raises(TrainingError, match="roll_back does not work in a custom script"),
        swarmtrain.trainer.run(trainer={"non_finite": "roll_back", "save_dir": str(tmp_path)}),
    ):
        pass


@pytest.mark.usefixtures("_single_process")
def test_the_best_are_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's checkpoint of the same name may have the same time, on a disk with coarse timestamps."""
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 1, "eval_interval": 1}
    for name, measured, kept in [("one", [1, 2, 3], [1, 3]), ("other", [3, 1, 2], [2, 3])]:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with swarmtrain.trainer.run(trainer={"save_dir": "run", "save_interval": None, "save_in_background": False, **keeps}) as run:
            run.add_callback("saved", lambda step, path: os.utime(path / "manifest.json", (1, 1)))
            run.register_for_checkpointing(model=nn.Linear(1, 1))
            for loss in run.steps(measured):
                run.save_if_due(metric=loss)
                assert not run.stop_requested
        assert list_saved_steps(tmp_path / name) == kept


@pytest.mark.usefixtures("_single_process")
def test_rates_are_warmed_up_and_resume_where_they_were() -> None:
    """Step k uses the rate that the line from 0.1 to 0.4 has after k - 1 of four steps."""
    rates: list[float] = []
    for last in (3, 7):
        with swarmtrain.trainer.run(trainer={"save_dir": "run"}) as run:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = swarmtrain.trainer.build_linear_scaling_warmup(optimizer, 4, steps=4)
            run.register_for_checkpointing(model=model, optimizer=optimizer, schedule=schedule)
            for given in run.steps([1.0] * 7, max_steps=last):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                model(torch.tensor([given])).square().sum().backward()
                optimizer.step()
                schedule.step()
                run.save_if_due()
                assert not run.stop_requested
    assert rates == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.4])


def test_objects_are_made_by_their_path() -> None:
    made = swarmtrain.trainer.instantiate({"_target_": "torch.nn.Linear", "in_features": 2}, out_features=3)
    assert made.weight.shape == (3, 2)
    nested = {"_target_": "torch.nn.Sequential"}
    inner = {"_target_": "functools.partial", "func": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}}
    assert isinstance(swarmtrain.trainer.instantiate(nested, made)[0], nn.Linear)
    assert isinstance(swarmtrain.trainer.instantiate({**inner, "_target_": "builtins.dict"})["func"], nn.Linear)
    for values, match in [
        ({"_target_": "torch.nn.Liner"}, "instantiate torch.nn.Liner: torch.nn has no Liner"),
        ({"_target_": "no.such.thing"}, "module not found"),
        ({"in_features": 2}, "has no _target_"),
        ({"_target_": "torch.nn.Linear", "sizes": 2}, "does not accept its arguments"),
    ]:
        with pytest.raises(TrainingError, match=match):
            swarmtrain.trainer.instantiate(values)


def test_trees_come_back_as_they_were() -> None:
    tree = {"a": [1, 2.5, "x", None, True], 0: ({"b": torch.arange(3)}, torch.tensor(True)), ("k", 1): torch.zeros(2, 0, dtype=torch.int32)}
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(flatten_state(tree, "object", tensors))
    back = unflatten_state(json.loads(text), tensors)
    assert back.keys() == tree.keys()
    assert back["a"] == tree["a"]
    assert torch.equal(back[0][0]["b"], torch.arange(3))
    assert back[0][1].dtype == torch.bool
    assert back["k", 1].shape == (2, 0)
    assert back["k", 1].dtype == torch.int32
