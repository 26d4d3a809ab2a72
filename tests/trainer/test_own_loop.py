"""A script of one's own with the five lines: it goes on in any world, as if nothing had happened, and says which line it lacks."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loop import BATCH, EPOCHS, SAMPLES
from own_shards import EPOCHS as SHARDS_EPOCHS
from own_shards import LENGTHS, batch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from worlds import World, losses, manifest, steps_saved

import swarmtrain.trainer
from swarmtrain.errors import ForeignCheckpoint, TrainingError
from swarmtrain.trainer.checkpoint.trees import put_together, take_apart
from swarmtrain.trainer.own.dealt import Dealt
from swarmtrain.wire import EXIT_PLANNED

STEPS = EPOCHS * -(-SAMPLES // BATCH)


def ran(folder: Path, size: int, code: int = 0, **environ: str) -> World:
    world = World(folder, {}, size, environ, script="own_loop")
    assert world.wait() == [code] * size, world.log()
    return world


def weights(folder: Path) -> list[Any]:
    values: list[Any] = json.loads((folder / "weights.json").read_text())
    return values


def seen(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, all ranks together; the last time that it was made."""
    found: dict[int, dict[str, list[int]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], {})[path.name] = line["ids"]
    return {step: sorted(sample for ids in by_rank.values() for sample in ids) for step, by_rank in found.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ran(folder, 2, DROPOUT="1")
    return folder


def test_each_sample_comes_once_an_epoch(undisturbed: Path) -> None:
    found = seen(undisturbed)
    assert sorted(found) == [*range(1, STEPS + 1)]
    per_epoch = STEPS // EPOCHS
    orders = [[found[step] for step in range(begun + 1, begun + per_epoch + 1)] for begun in range(0, STEPS, per_epoch)]
    assert [sorted(sample for step in epoch for sample in step) for epoch in orders] == [[*range(SAMPLES)]] * EPOCHS
    assert orders[0] != orders[1]


@pytest.mark.parametrize("environ", [{"DIES": "6"}, {"LEAVES": "6"}], ids=["a rank dies", "asked to leave"])
def test_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, undisturbed: Path, environ: dict[str, str]) -> None:
    world = World(tmp_path, {}, 2, {"DROPOUT": "1", **environ}, script="own_loop")
    codes = world.wait()
    if "LEAVES" in environ:
        assert codes == [EXIT_PLANNED] * 2, world.log()
        assert steps_saved(tmp_path) == [4, 6]
    else:
        assert codes[1] == -signal.SIGKILL
    again = ran(tmp_path, 2, DROPOUT="1")
    assert f"goes on after step {6 if 'LEAVES' in environ else 4}" in again.log()
    assert weights(tmp_path) == weights(undisturbed)
    assert seen(tmp_path) == seen(undisturbed)
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.parametrize("size", [1, 3])
def test_another_world_goes_on_with_the_same_samples_and_losses(tmp_path: Path, size: int) -> None:
    """12 samples of a step, and 8 of an epoch's last: three ranks have 3, 3 and 2 of these."""
    ran(tmp_path / "whole", 2)
    ran(tmp_path / "changed", 2, EXIT_PLANNED, LEAVES="5")
    world = ran(tmp_path / "changed", size)
    assert "goes on after step 5" in world.log()
    assert seen(tmp_path / "changed") == seen(tmp_path / "whole")
    whole, other = losses(tmp_path / "whole"), losses(tmp_path / "changed")
    assert other == pytest.approx(whole, rel=1e-5)
    assert ran(tmp_path / "changed", 1).log().count("the end") == size + 1, "a run that is done has nothing left to do"


def shards(folder: Path, code: int = 0, **environ: str) -> World:
    world = World(folder, {}, len(LENGTHS), environ, script="own_shards")
    assert world.wait() == [code] * len(LENGTHS), world.log()
    return world


def read(folder: Path) -> dict[tuple[int, int], tuple[int, int, float]]:
    """Return what each rank has seen at each step: epoch, batch, weight."""
    found = {}
    for rank in range(len(LENGTHS)):
        for line in map(json.loads, (folder / f"seen-{rank}.jsonl").read_text().splitlines()):
            found[rank, line["step"]] = line["epoch"], line["name"], line["weight"]
    return found


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    shards(folder)
    return folder


def test_shards_of_unequal_lengths_are_read_to_the_end_of_the_longest(joined: Path) -> None:
    longest, size = max(LENGTHS), len(LENGTHS)
    wanted = {}
    for epoch in range(SHARDS_EPOCHS):
        for number in range(longest):
            having = sum(number < length for length in LENGTHS)
            for rank, length in enumerate(LENGTHS):
                name, weight = 10 * rank + min(number, length - 1), size / having if number < length else 0.0
                wanted[rank, epoch * longest + number + 1] = epoch, name, weight
    assert read(joined) == wanted
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {}
    for step in range(1, SHARDS_EPOCHS * longest + 1):
        number = (step - 1) % longest
        batches = [batch(rank, number) for rank, length in enumerate(LENGTHS) if number < length]
        loss = (model(torch.cat(batches)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told[step] = float(loss.detach())
    assert losses(joined) == pytest.approx(told, rel=1e-5), "the mean over what there is"


@pytest.mark.parametrize("step", [4, 5, 8])
def test_they_go_on_where_some_have_nothing_left(joined: Path, tmp_path: Path, step: int) -> None:
    shards(tmp_path, EXIT_PLANNED, LEAVES=str(step))
    assert f"goes on after step {step}" in shards(tmp_path).log()
    assert read(tmp_path) == read(joined)
    assert weights(tmp_path) == weights(joined)


def test_what_is_changed_at_random_is_changed_alike(joined: Path, tmp_path: Path) -> None:
    shards(tmp_path / "whole", AUGMENTED="1")
    shards(tmp_path / "again", EXIT_PLANNED, AUGMENTED="1", LEAVES="7")
    shards(tmp_path / "again", AUGMENTED="1")
    assert weights(tmp_path / "again") == weights(tmp_path / "whole") != weights(joined)


def test_a_shard_without_anything_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, {}, 3, {"LENGTHS": "[2, 0, 1]"}, script="own_shards")
    assert all(world.wait())
    assert world.log().count("rank 1 has no batch, and others have") >= 3


def test_what_it_is_saved_with(undisturbed: Path) -> None:
    content = manifest(undisturbed, STEPS)
    assert content["tensors"]["model/0.weight"]["size"] == [16, 8], "without the names that DistributedDataParallel adds"
    assert content["state"]["going"] == {"batch": BATCH, "samples": SAMPLES, "steps of an epoch": STEPS // EPOCHS}
    assert not list(undisturbed.rglob("*.pt"))


def dealt(samples: int, batch: int, size: int, *, shuffled: bool = True, drop_last: bool = False) -> list[list[tuple[list[int], float]]]:
    """Return the samples and weights of each step of an epoch, by step and rank."""
    loader = DataLoader(list(range(samples)), batch_size=4, shuffle=shuffled, drop_last=drop_last)  # type: ignore[arg-type]
    ranks = [Dealt(loader, rank, size, 5, batch) for rank in range(size)]
    rows = [[(given.tolist(), weight) for given, weight in one.batches(0)] for one in ranks]
    return [list(step) for step in zip(*rows, strict=True)]


@pytest.mark.parametrize(("samples", "batch", "size"), [(44, 12, 2), (44, 12, 3), (25, 12, 5), (7, 7, 7), (100, 9, 4), (13, 12, 4)])
def test_weights_make_the_mean_of_ranks_that_of_samples(samples: int, batch: int, size: int) -> None:
    values = torch.randn(samples, generator=torch.Generator().manual_seed(1)).double()
    steps = dealt(samples, batch, size)
    assert len(steps) == -(-samples // batch)
    whole = dealt(samples, batch, 1)
    for step, [(ids, one)] in zip(steps, whole, strict=True):
        assert one == 1
        assert sorted(sample for mine, weight in step if weight for sample in mine) == sorted(ids)
        assert sum(weight for _, weight in step) == pytest.approx(size)
        mean = sum(values[mine].mean() * weight for mine, weight in step) / size
        assert mean == pytest.approx(values[ids].mean())
    assert dealt(samples, batch, 1, shuffled=False)[0] == [([*range(batch)], 1)]
    assert len(dealt(samples, batch, size, drop_last=True)) == samples // batch


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Samples each of which is changed at random, by three generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.random()), random.gauss(0, 1)

    def __len__(self) -> int:
        return 20


class Batched(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


def noise(*, size: int = 1, workers: int = 0, done: int = 0, data: type[Noisy] = Noisy) -> dict[int, list[float]]:
    """Return how each sample of the second epoch is changed, after `done` of its steps."""
    found = {}
    for rank in range(size):
        loader = DataLoader(data(), batch_size=2, shuffle=True, num_workers=workers)
        for given, weight in Dealt(loader, rank, size, 5, 6).batches(4 + done):
            rows = torch.stack([values.double() for values in given], 1).tolist()
            found.update({int(index): changes for index, *changes in rows if weight})
    return found


def test_what_is_changed_at_random_is_changed_alike_whoever_reads_it() -> None:
    whole = noise()
    assert len({change for changes in whole.values() for change in changes}) == 3 * 20
    assert noise(workers=2) == whole
    assert noise(size=2) == whole
    assert noise(size=3, workers=1) == whole
    later = noise(done=2, workers=2)
    assert 0 < len(later) < 20
    assert later == {index: whole[index] for index in later}
    assert noise(data=Batched, workers=2, done=2).items() <= noise(data=Batched).items()


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def loop(trainer: dict[str, Any], data: Any, kept: dict[str, Any], *, save: bool = True, ask: bool = True, **options: Any) -> list[Any]:
    """Return what a script that may lack lines is given."""
    found = []
    with swarmtrain.trainer.run(trainer=trainer) as run:
        if kept:
            run.keep(**kept)
        for given in run.steps(data, **options):
            found.append(given)
            if save:
                run.save_if_due()
            if ask:
                assert not run.asked_to_leave
    return found


def refused(match: str, data: Any = None, kept: dict[str, Any] | None = None, **options: Any) -> None:
    with pytest.raises(TrainingError, match=match):
        loop({"save_dir": "run"}, data or [1, 2, 3], kept or {"model": nn.Linear(1, 1)}, **options)


@pytest.mark.usefixtures("_alone")
def test_it_says_which_line_is_missing() -> None:
    def lacks(match: str, *, keep: bool = True, save: bool = True, ask: bool = True, **trainer: Any) -> None:
        with pytest.raises(TrainingError, match=match):
            loop(trainer, [1, 2, 3], {"model": nn.Linear(1, 1)} if keep else {}, save=save, ask=ask)

    lacks(r"config trainer.save_dir: there is no folder")
    lacks(r"steps: nothing is kept", keep=False, save_dir="a")
    lacks(r"the loop lacks `run.save_if_due\(\)`$", save=False, save_dir="b")
    lacks(r"the loop lacks `if run.asked_to_leave: run.leave\(\)`$", ask=False, save_dir="c")
    lacks(r"lacks `run.save_if_due\(\)` and `if run.asked", save=False, ask=False, save_dir="d")


@pytest.mark.usefixtures("_alone")
def test_what_cannot_be_kept_or_dealt_out() -> None:
    refused("model has no state_dict", kept={"model": 3})
    refused("model/f.*cannot be kept: function", kept={"model": Odd()})
    refused("WeightedRandomSampler", DataLoader([1, 2], sampler=WeightedRandomSampler([1, 1], 2)))  # type: ignore[arg-type]
    refused("batch_sampler of its own", DataLoader([1, 2], batch_sampler=[[0, 1]]))  # type: ignore[arg-type]
    refused("the data is at its end", iter([1, 2, 3]), epochs=2)


class Odd:
    def state_dict(self) -> Any:
        return {"f": lambda: None}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.usefixtures("_alone")
def test_what_is_iterated_goes_on_and_changes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def read(steps: int, seed: int = 1, **kept: Any) -> list[int]:
        data = DataLoader(Counting(), batch_size=2)
        return [int(given[0]) for given in loop({"save_dir": "run", "seed": seed}, data, kept or {"model": nn.Linear(1, 1)}, steps=steps)]

    assert read(3) == [0, 2, 4]
    assert read(7, seed=2) == [6, 8, 0, 2]
    assert "config.trainer.seed is 1 there and 2 here" in capsys.readouterr().out
    assert read(7) == []
    with pytest.raises(ForeignCheckpoint, match="has model, and the script keeps another"):
        read(8, another=nn.Linear(1, 1))
    with pytest.raises(ForeignCheckpoint, match=r"model does not take it: (.|\n)*size mismatch"):
        read(8, model=nn.Linear(2, 1))


@pytest.mark.usefixtures("_alone")
def test_functions_are_called_in_their_order_and_the_end_comes_whatever_happens() -> None:
    told: list[Any] = []

    def train() -> None:
        with swarmtrain.trainer.run(trainer={"save_dir": "run", "save_interval": 2}) as run:
            run.at("end", lambda: told.append("end"))
            run.at("end", lambda: told.remove("nothing"), priority=1)
            run.at("step", lambda step: told.append(f"late {step}"))
            run.at("step", lambda step: told.append(f"early {step}"), priority=5)
            run.at("saved", lambda step, path: told.append(f"{path.name} of {step}"))
            run.keep(model=nn.Linear(1, 1))
            for number in run.steps([3, 2, 1, 0]):
                run.save_if_due()
                assert not run.asked_to_leave
                told.append(6 // number)

    with pytest.raises(ZeroDivisionError):
        train()
    assert [each for each in told if not str(each).startswith("step-")] == [
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


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("highest_or_lowest", "kept"), [("lowest", [2, 4, 7]), ("highest", [1, 3, 7])])
def test_the_best_checkpoints_are_kept(tmp_path: Path, highest_or_lowest: str, kept: list[int]) -> None:
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 2, "eval_interval": 1, "best_checkpoints_are": highest_or_lowest}
    trainer = {"save_dir": "run", "save_interval": None, "save_in_background": False, **keeps}
    with swarmtrain.trainer.run(trainer=trainer) as run:
        run.keep(model=nn.Linear(1, 1))
        for number in run.steps([5, 1, 4, 0.5, 3, 2, 9]):
            run.save_if_due(measured=number if run.step != 7 else None)
            assert not run.asked_to_leave
    assert steps_saved(tmp_path) == kept
    assert manifest(tmp_path, 3 if 3 in kept else 2)["held_out_loss"] in (4, 1)


@pytest.mark.usefixtures("_alone")
def test_the_best_are_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's checkpoint of the same name may be of the same time, by a disk whose clock is coarse."""
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 1, "eval_interval": 1}
    for name, measured, kept in [("one", [1, 2, 3], [1, 3]), ("other", [3, 1, 2], [2, 3])]:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with swarmtrain.trainer.run(trainer={"save_dir": "run", "save_interval": None, "save_in_background": False, **keeps}) as run:
            run.at("saved", lambda step, path: os.utime(path / "manifest.json", (1, 1)))
            run.keep(model=nn.Linear(1, 1))
            for loss in run.steps(measured):
                run.save_if_due(measured=loss)
                assert not run.asked_to_leave
        assert steps_saved(tmp_path / name) == kept


@pytest.mark.usefixtures("_alone")
def test_rates_are_ramped_up_and_go_on_where_they_were() -> None:
    """Step k is made at the rate that the line from 0.1 to 0.4 has after k - 1 of four steps."""
    rates: list[float] = []
    for last in (3, 7):
        with swarmtrain.trainer.run(trainer={"save_dir": "run"}) as run:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = swarmtrain.trainer.ramp(optimizer, 4, steps=4)
            run.keep(model=model, optimizer=optimizer, schedule=schedule)
            for given in run.steps([1.0] * 7, steps=last):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                model(torch.tensor([given])).square().sum().backward()
                optimizer.step()
                schedule.step()
                run.save_if_due()
                assert not run.asked_to_leave
    assert rates == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.4])


def test_objects_are_made_by_their_path() -> None:
    made = swarmtrain.trainer.make({"_target_": "torch.nn.Linear", "in_features": 2}, out_features=3)
    assert made.weight.shape == (3, 2)
    nested = {"_target_": "torch.nn.Sequential"}
    inner = {"_target_": "functools.partial", "func": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}}
    assert isinstance(swarmtrain.trainer.make(nested, made)[0], nn.Linear)
    assert isinstance(swarmtrain.trainer.make({**inner, "_target_": "builtins.dict"})["func"], nn.Linear)
    for values, match in [
        ({"_target_": "torch.nn.Liner"}, "make torch.nn.Liner: torch.nn has no Liner"),
        ({"_target_": "no.such.thing"}, "there is no such module"),
        ({"in_features": 2}, "has no _target_"),
        ({"_target_": "torch.nn.Linear", "sizes": 2}, "does not take what it is given"),
    ]:
        with pytest.raises(TrainingError, match=match):
            swarmtrain.trainer.make(values)


def test_trees_come_back_as_they_were() -> None:
    tree = {"a": [1, 2.5, "x", None, True], 0: ({"b": torch.arange(3)}, torch.tensor(True)), ("k", 1): torch.zeros(2, 0, dtype=torch.int32)}
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(take_apart(tree, "object", tensors))
    back = put_together(json.loads(text), tensors)
    assert back.keys() == tree.keys()
    assert back["a"] == tree["a"]
    assert torch.equal(back[0][0]["b"], torch.arange(3))
    assert back[0][1].dtype == torch.bool
    assert back["k", 1].shape == (2, 0)
    assert back["k", 1].dtype == torch.int32
