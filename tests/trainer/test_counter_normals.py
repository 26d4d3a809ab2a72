"""Initial values: numbers that depend on their place only, have the normal distribution, and are drawn by each rank for its shard alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import counter_normals
from swarmtrain.trainer.model.counter_normals import draw_normals
from swarmtrain.trainer.model.initialization import ParameterInitializer, select_all

SEED = 1234567
SPLITMIX64_OUTPUTS = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
"""The first outputs of SplitMix64 with the seed 1234567, from the reference implementation of Vigna (2015)."""


def draw(rows: int, columns: int, *, region: tuple[slice, slice] | None = None, deviation: float = 1.0) -> torch.Tensor:
    """Return a part of the matrix (rows, columns); by default all of it."""
    row_range, column_range = region or (slice(0, rows), slice(0, columns))
    target = torch.full((row_range.stop - row_range.start, column_range.stop - column_range.start), math.nan)
    draw_normals(target, deviation, seed=SEED, columns=columns, first_row=row_range.start, first_column=column_range.start)
    return target


def test_the_words_are_the_outputs_of_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is the sum of the two table entries whose indices are the halves of its half of the word."""
    table = torch.arange(1 << 16, dtype=torch.float64)
    monkeypatch.setattr(counter_normals, "_build_quantile_table", lambda: table)
    target = torch.empty(1, 10, dtype=torch.float64)
    draw_normals(target, 2**0.5, seed=SEED, columns=10)
    halves = [half for word in SPLITMIX64_OUTPUTS for half in (word & 0xFFFFFFFF, word >> 32)]
    assert target.tolist() == [[(half & 0xFFFF) + (half >> 16) for half in halves]]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_each_part_has_the_values_of_the_whole(data: st.DataObject, rows: int, columns: int) -> None:
    first_row, first_column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    region = slice(first_row, data.draw(st.integers(first_row, rows))), slice(first_column, data.draw(st.integers(first_column, columns)))
    assert torch.equal(draw(rows, columns, region=region), draw(rows, columns)[region])


def test_experts_that_are_sharded_have_the_values_of_the_whole() -> None:
    """A parameter with three dimensions, which custom modules can have, is divided in its first."""
    initializer, size = ParameterInitializer(TransformerArchitectureConfig(), 1), torch.Size([6, 3, 5])
    whole, part = torch.zeros(size), torch.zeros(2, 3, 5)
    initializer.write_region("blocks.0.mlp.experts", size, select_all(size), whole)
    initializer.write_region("blocks.0.mlp.experts", size, (slice(3, 5), slice(0, 3), slice(0, 5)), part)
    assert torch.equal(part, whole[3:5])
    assert whole.unique().numel() == whole.numel()
    initializer.write_region("blocks.0.mlp.experts", size, (slice(6, 6), slice(0, 3), slice(0, 5)), torch.zeros(0, 3, 5))


def test_the_values_do_not_depend_on_the_number_of_threads() -> None:
    cores = torch.get_num_threads()
    try:
        drawn = []
        for count in (1, 3):
            torch.set_num_threads(count)
            parameter = torch.nn.Parameter(torch.empty(300, 1001))
            with torch.no_grad():
                draw_normals(parameter, 1.0, seed=SEED, columns=1001)
            drawn.append(parameter)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(cores)
    assert torch.equal(*drawn)


def test_the_distribution_is_normal() -> None:
    """4 million values: moments, distribution function and tails, each within four standard errors of the normal distribution's."""
    count = 2000 * 2000
    values = draw(2000, 2000).double().flatten()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert values.pow(power).mean().item() == pytest.approx(expected, abs=4 * (variance / count) ** 0.5)
    distribution = torch.special.ndtr(values.sort().values)
    distance = (distribution - (torch.arange(count) + 0.5) / count).abs().max().item()
    assert distance * count**0.5 < 1.95  # exceeded by chance once in 1000 times (Kolmogorov)
    for limit in (3, 4):
        expected = count * math.erfc(limit / 2**0.5)
        assert (values.abs() > limit).sum().item() == pytest.approx(expected, abs=4 * expected**0.5 + 0.06 * expected)


def test_neighbours_are_independent() -> None:
    values = draw(1000, 1000).double()
    for shifted, rest in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1])):
        assert (shifted * rest).mean().item() == pytest.approx(0, abs=4 / shifted.numel() ** 0.5)
        assert ((shifted**2 - 1) * (rest**2 - 1)).mean().item() == pytest.approx(0, abs=8 / shifted.numel() ** 0.5)
