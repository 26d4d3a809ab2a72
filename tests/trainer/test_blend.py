"""Blends: each set has its share at every position, in an order of its own that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from pydantic import ValidationError
from worlds import World, audit, changed, train

from swarmtrain.config.data import BlendedDatasetConfig, DataConfig
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.data import blend, memory_map
from swarmtrain.trainer.data.blend import PERIOD, Blend
from swarmtrain.trainer.data.samples import Samples

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=256)
SHARES = some.lists(some.integers(1, 60), min_size=1, max_size=12)


@given(shares=SHARES, base=some.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_each_set_has_its_share_give_or_take_one(shares: list[int], base: int) -> None:
    """At every position of three periods, wherever these begin."""
    period = sum(shares)
    base -= base % period
    sets, turns = Blend(shares).places(np.arange(base, base + 3 * period))
    for number, share in enumerate(shares):
        had = np.cumsum(sets == number)  # in these periods: before them it had just its share
        assert (abs(had * period - np.arange(1, 3 * period + 1) * share) < period).all()
        assert list(turns[sets == number]) == list(range(base // period * share, (base // period + 3) * share)), "turns follow each other"


@given(shares=SHARES, position=some.integers(0, 1000), count=some.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_any_position_is_found_at_once(shares: list[int], position: int, count: int) -> None:
    whole, part = Blend(shares).places(np.arange(1200)), Blend(shares).places(np.arange(position, position + count))
    assert [list(each) for each in part] == [list(each[position : position + count]) for each in whole]


@given(weights=some.lists(some.fractions(Fraction(1, 10**6), 10**6), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_shares_are_the_weights(weights: list[Fraction]) -> None:
    """Exactly where a period is short enough, else rounded to parts of it."""
    shares = blend.shares(weights)
    assert min(shares) >= 1
    exact = [weight / sum(weights) for weight in weights]
    if sum(shares) < PERIOD - len(shares):
        assert [Fraction(share, sum(shares)) for share in shares] == exact
    assert max(abs(share - sum(shares) * due) for share, due in zip(shares, exact, strict=True)) <= len(shares)


def test_decimal_weights_are_exact() -> None:
    assert blend.shares(blend.weights(BlendedDatasetConfig(weights=(0.7, 0.2, 0.1)), [1, 1, 1])) == [7, 2, 1]
    assert blend.shares(blend.weights(BlendedDatasetConfig(weights=(3, 1)), [1, 1])) == [3, 1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BlendedDatasetConfig(weight_by_num_documents=True), [100, 10000]),
        (BlendedDatasetConfig(weight_by_num_documents=True, weighted_sampler_alpha=0.5), [10, 100]),
        (BlendedDatasetConfig(weight_by_num_documents=True, weighted_sampler_alpha=0.0), [1, 1]),
        (BlendedDatasetConfig(weight_examples_proportional=True, ep_maximum=400), [100, 400]),
        (BlendedDatasetConfig(weight_examples_proportional=True, ep_maximum=400, ep_temperature=2.0), [10, 20]),
    ],
)
def test_weights_by_documents(config: BlendedDatasetConfig, expected: list[int]) -> None:
    assert blend.weights(config, [100, 10000]) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": (0.5, 0.0)}, "has 0.0 as number 1"),
        ({"weights": (1.0,), "weight_by_num_documents": True}, "exclude each other"),
        ({"weighted_sampler_alpha": 0.5}, "is a power of the number of documents"),
        ({"ep_maximum": 5}, "is of weights by examples"),
    ],
)
def test_weights_that_make_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BlendedDatasetConfig(**values)


def test_each_prefix_has_a_weight() -> None:
    with pytest.raises(ValidationError, match="has 2 weights for 1 data_prefixes"):
        DataConfig(data_prefixes=(Path("a"),), blended_dataset=BlendedDatasetConfig(weights=(0.5, 0.5)))


def blended(folder: Path, sizes: Sequence[int], weights: Sequence[float]) -> Samples:
    for number, size in enumerate(sizes):
        memory_map.write(folder / str(number), [np.full(4 * size + 1, number)], "uint8")
    return Samples([folder / str(number) for number in range(len(sizes))], SHAPE, 5, mix=BlendedDatasetConfig(weights=tuple(weights)))


@given(sizes=some.lists(some.integers(1, 40), min_size=1, max_size=4), data=some.data())
@settings(max_examples=12, deadline=None)
def test_each_set_has_epochs_of_its_own(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: some.DataObject) -> None:
    """In each of its epochs every sample once; and the same ids however the run is divided into batches."""
    weights = data.draw(some.lists(some.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    samples = blended(tmp_path_factory.mktemp("blend"), sizes, weights)
    ids = samples.batch(0, 200).ids
    begins = [0, *accumulate(sizes)]
    for number, size in enumerate(sizes):
        own = ids[(begins[number] <= ids) & (ids < begins[number + 1])] - begins[number]
        assert (samples.load(own + begins[number]).inputs == number).all()
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    step = data.draw(some.integers(20, 90))
    pieces = [samples.batch(position, min(step, 200 - position)).ids for position in range(0, 200, step)]
    assert list(np.concatenate(pieces)) == list(ids)


def test_what_decides_the_order_is_in_the_fingerprint(tmp_path: Path) -> None:
    """So that a run is not taken up again with other weights, as if nothing had changed."""
    prints = {blended(tmp_path, (8, 8), weights).fingerprint for weights in ((1, 1), (2, 1), (2, 2))}
    assert len(prints) == 2
    assert Samples([tmp_path / "0", tmp_path / "1"], SHAPE, 5).fingerprint not in prints


def test_order_of_a_blend_does_not_change_between_releases(tmp_path: Path) -> None:
    """These values are part of the checkpoint's format."""
    assert blended(tmp_path, (5, 7), (0.75, 0.25)).batch(0, 6).ids.tolist() == [0, 4, 1, 11, 2, 3]


def test_a_blended_run_is_the_same_in_every_world(tmp_path: Path, config: dict[str, Any]) -> None:
    """Two ranks, then one, with packed documents: the samples of a run that was never touched. Other weights are refused."""
    prefixes = [*config["data"]["data_prefixes"], *config["data"]["validation_data_prefixes"]]
    data = {"data_prefixes": prefixes, "validation_data_prefixes": [], "validation_fraction": 0.1, "packing": "documents"}
    base = changed(config, data={**data, "blended_dataset": {"weights": [0.7, 0.3]}})
    once = train(tmp_path / "once", base)
    train(tmp_path / "twice", changed(base, trainer={"train_iterations": 6}), 2)
    assert train(tmp_path / "twice", base) == once
    assert samples_by_step(tmp_path / "twice") == samples_by_step(tmp_path / "once")
    world = World(tmp_path / "twice", changed(base, data={"blended_dataset": {"weights": [0.6, 0.4]}}), 1)
    assert world.wait() == [1]
    assert "was trained on other data, or in another order" in world.log()


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    """Return the ids of each step's samples, all replicas together."""
    ids: dict[int, list[int]] = {}
    for line in audit(folder):
        ids.setdefault(line["step"], []).extend(line["samples"])
    return {step: sorted(of_step) for step, of_step in ids.items()}
