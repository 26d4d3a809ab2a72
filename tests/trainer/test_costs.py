"""What a step costs: each part of it stays within its budget, and the counter counts what a GPU would do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import costs
from benchmarks.counting.operation_counter import OperationCosts, OperationCounter
from benchmarks.counting.swarmtrain_step import count_step_costs
from swarmtrain.config import Config
from swarmtrain.trainer.memory.fused_rms_norm import fuse_rms_norm


def count_steps(requests: Sequence[costs.Request]) -> Sequence[costs.StepCosts]:
    counted = [count_step_costs(Config.from_json(json.dumps(each["config"])), int(str(each["world_size"]))) for each in requests]
    return [(asdict(passes), asdict(update)) for passes, update in counted]


@pytest.mark.parametrize("ranks", [1, pytest.param(8, marks=pytest.mark.test_all_only("the same with more ranks"))])
def test_each_part_of_a_step_stays_within_its_budget(ranks: int) -> None:
    rows = [row for row in costs.ROWS if row.name.startswith("fsdp/") == (ranks > 1)]
    parts = costs.count_parts(ranks, count_steps)
    counted = {row.name: (costs.read_quantity(parts, row), row.budget) for row in rows}
    assert {name: values for name, values in counted.items() if values[0] > values[1]} == {}
    # A budget that is higher than needed would not notice a new cost.
    assert {name: values for name, values in counted.items() if values[0] < 0.98 * values[1]} == {}


def count(compute: Callable[[Tensor, Tensor], object]) -> OperationCosts:
    with FakeTensorMode(), fuse_rms_norm():
        matrix, column = torch.zeros(100, 100), torch.zeros(100, 1)
        with OperationCounter() as counter:
            compute(matrix, column)
    return counter.total


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda matrix, column: matrix.t()[:5].unsqueeze(0), OperationCosts()),
        (lambda matrix, column: torch.empty(5), OperationCosts()),
        (lambda matrix, column: matrix + column, OperationCosts(kernels=1, bytes_moved=4 * (10_000 + 100 + 10_000))),
        (lambda matrix, column: matrix + column.expand(100, 100), OperationCosts(kernels=1, bytes_moved=4 * (10_000 + 100 + 10_000))),
        (lambda matrix, column: matrix.mul_(2), OperationCosts(kernels=1, bytes_moved=4 * 20_000)),
        (lambda matrix, column: matrix.zero_(), OperationCosts(kernels=1, bytes_moved=4 * 10_000)),
        (lambda matrix, column: matrix.copy_(column), OperationCosts(kernels=1, bytes_moved=4 * 10_100)),
        (lambda matrix, column: matrix.bfloat16(), OperationCosts(kernels=1, casts=1, bytes_moved=6 * 10_000)),
        (lambda matrix, column: matrix.float(), OperationCosts()),
        (lambda matrix, column: matrix @ column, OperationCosts(kernels=1)),
        (lambda matrix, column: torch.nn.functional.rms_norm(matrix, (100,), matrix[0]), OperationCosts(kernels=1, bytes_moved=80_800)),
        (lambda matrix, column: column.flatten()[:3].tolist(), OperationCosts(synchronizations=1)),
        (lambda matrix, column: [float(matrix[0, 0]), float(matrix.sum())], OperationCosts(1, 0, 2, 4 * 10_001)),
        (lambda matrix, column: torch.tensor([1.0, 2.0]).mul(3).tolist(), OperationCosts()),
    ],
)
def test_the_counter_counts_what_a_gpu_would_do(compute: Callable[[Tensor, Tensor], object], expected: OperationCosts) -> None:
    assert count(compute) == expected


def test_a_normalization_is_one_operation_in_each_direction() -> None:
    def compute(matrix: Tensor, column: Tensor) -> None:
        weight = torch.nn.Parameter(torch.zeros(100))
        torch.nn.functional.rms_norm(matrix.requires_grad_(), (100,), weight).backward(matrix)

    without_the_weight = count(lambda matrix, column: torch.zeros(100))
    assert (count(compute) - without_the_weight).kernels == 2
