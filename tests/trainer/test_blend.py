"""Dataset blends: each set has its share at every position, in its own order that depends on nothing else."""

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
from worlds import LocalWorld, merge_config, read_audit, run_training

from swarmtrain.config.schema.data import BlendedDatasetConfig, DataConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.data import blend, memory_map
from swarmtrain.trainer.data.blend import MAX_PERIOD, Blend
from swarmtrain.trainer.data.samples import TokenDataset

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=256)
SHARES = some.lists(some.integers(1, 60), min_size=1, max_size=12)


@given(shares=SHARES, base=some.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_each_set_has_its_share_give_or_take_one(shares: list[int], base: int) -> None:
    """At every position of three periods, wherever the periods begin."""
    period = sum(shares)
    base -= base % period
    sets, turns = Blend(shares).find_datasets_at(np.arange(base, base + 3 * period))
    for number, share in enumerate(shares):
        had = np.cumsum(sets == number)  # in these periods: before them it had exactly its share
        assert (abs(had * period - np.arange(1, 3 * period + 1) * share) < period).all()
        assert list(turns[sets == number]) == list(range(base // period * share, (base // period + 3) * share)), "turns follow each other"


@given(shares=SHARES, position=some.integers(0, 1000), count=some.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_any_position_is_found_at_once(shares: list[int], position: int, count: int) -> None:
    whole, part = Blend(shares).find_datasets_at(np.arange(1200)), Blend(shares).find_datasets_at(np.arange(position, position + count))
    assert [list(each) for each in part] == [list(each[position : position + count]) for each in whole]


@given(weights=some.lists(some.fractions(Fraction(1, 10**6), 10**6), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_shares_are_the_weights(weights: list[Fraction]) -> None:
    """Exactly if the period is short enough, otherwise rounded to fractions of the period."""
    shares = blend.compute_integer_weights(weights)
    assert min(shares) >= 1
    exact = [weight / sum(weights) for weight in weights]
    if sum(shares) < MAX_PERIOD - len(shares):
        assert [Fraction(share, sum(shares)) for share in shares] == exact
    assert max(abs(share - sum(shares) * due) for share, due in zip(shares, exact, strict=True)) <= len(shares)


def test_decimal_weights_are_exact() -> None:
    assert blend.compute_integer_weights(blend.compute_dataset_weights(BlendedDatasetConfig(weights=(0.7, 0.2, 0.1)), [1, 1, 1])) == [
        7,
        2,
        1,
    ]
    assert blend.compute_integer_weights(blend.compute_dataset_weights(BlendedDatasetConfig(weights=(3, 1)), [1, 1])) == [3, 1]


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
    assert blend.compute_dataset_weights(config, [100, 10000]) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": (0.5, 0.0)}, "has 0.0 at index 1"),
        ({"weights": (1.0,), "weight_by_num_documents": True}, "are mutually exclusive"),
        ({"weighted_sampler_alpha": 0.5}, "has an effect only with weight_by_num_documents"),
        ({"ep_maximum": 5}, "has an effect only with weight_examples_proportional"),
    ],
)
def test_weights_that_make_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BlendedDatasetConfig(**values)


def test_each_prefix_has_a_weight() -> None:
    with pytest.raises(ValidationError, match="has 2 weights for 1 data_prefixes"):
        DataConfig(data_prefixes=(Path("a"),), blended_dataset=BlendedDatasetConfig(weights=(0.5, 0.5)))


def build_blend(folder: Path, sizes: Sequence[int], weights: Sequence[float]) -> TokenDataset:
    for number, size in enumerate(sizes):
        memory_map.write_token_files(folder / str(number), [np.full(4 * size + 1, number)], "uint8")
    return TokenDataset(
        [folder / str(number) for number in range(len(sizes))], SHAPE, 5, blend_config=BlendedDatasetConfig(weights=tuple(weights))
    )


@given(sizes=some.lists(some.integers(1, 40), min_size=1, max_size=4), data=some.data())
@settings(max_examples=12, deadline=None)
def test_each_set_has_epochs_of_its_own(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: some.DataObject) -> None:
    """Each epoch of a set has every sample once, and the ids are the same however the run is divided into batches."""
    weights = data.draw(some.lists(some.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    samples = build_blend(tmp_path_factory.mktemp("blend"), sizes, weights)
    ids = samples.build_batch(0, 200).ids
    begins = [0, *accumulate(sizes)]
    for number, size in enumerate(sizes):
        own = ids[(begins[number] <= ids) & (ids < begins[number + 1])] - begins[number]
        assert (samples.load_samples(own + begins[number]).inputs == number).all()
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    step = data.draw(some.integers(20, 90))
    pieces = [samples.build_batch(position, min(step, 200 - position)).ids for position in range(0, 200, step)]
    assert list(np.concatenate(pieces)) == list(ids)


def test_what_decides_the_order_is_in_the_fingerprint(tmp_path: Path) -> None:
    """So that a run does not silently resume with other weights."""
    prints = {build_blend(tmp_path, (8, 8), weights).fingerprint for weights in ((1, 1), (2, 1), (2, 2))}
    assert len(prints) == 2
    assert TokenDataset([tmp_path / "0", tmp_path / "1"], SHAPE, 5).fingerprint not in prints


def test_order_of_a_blend_does_not_change_between_releases(tmp_path: Path) -> None:
    """These values are part of the checkpoint format."""
    assert build_blend(tmp_path, (5, 7), (0.75, 0.25)).build_batch(0, 6).ids.tolist() == [0, 4, 1, 11, 2, 3]


def test_a_blended_run_is_the_same_in_every_world(tmp_path: Path, config: dict[str, Any]) -> None:
    """Two ranks, then one, with packed documents: the same samples as in an uninterrupted run. Other weights are refused."""
    prefixes = [*config["data"]["data_prefixes"], *config["data"]["validation_data_prefixes"]]
    data = {"data_prefixes": prefixes, "validation_data_prefixes": [], "validation_fraction": 0.1, "packing": "documents"}
    base = merge_config(config, data={**data, "blended_dataset": {"weights": [0.7, 0.3]}})
    once = run_training(tmp_path / "once", base)
    run_training(tmp_path / "twice", merge_config(base, trainer={"train_iterations": 6}), 2)
    assert run_training(tmp_path / "twice", base) == once
    assert read_samples_by_step(tmp_path / "twice") == read_samples_by_step(tmp_path / "once")
    world = LocalWorld(tmp_path / "twice", merge_config(base, data={"blended_dataset": {"weights": [0.6, 0.4]}}), 1)
    assert world.wait() == [1]
    assert "was trained on different data, or in a different order" in world.read_log()


def read_samples_by_step(folder: Path) -> dict[int, list[int]]:
    """Return the sample ids of each step over all replicas."""
    ids: dict[int, list[int]] = {}
    for line in read_audit(folder):
        ids.setdefault(line["step"], []).extend(line["samples"])
    return {step: sorted(of_step) for step, of_step in ids.items()}
