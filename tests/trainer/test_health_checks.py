"""Health checks: replicas that differ, non-finite values, anomaly and deterministic mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import LocalWorld, list_saved_steps, merge_config

from swarmtrain.config.schema.trainer import DeterminismMode
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.health.replica_check import compute_checksums, find_differing_ranks
from swarmtrain.trainer.optim import gradient_checks
from swarmtrain.trainer.runtime import _configure_determinism


@pytest.fixture
def reset_deterministic_mode() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_but_no_order_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    (sound,) = compute_checksums([tensor])
    assert compute_checksums([tensor.flip(0), tensor.view(8, 8).T]) == [sound, sound]
    for bit in range(8 * dtype.itemsize):
        broken = tensor.clone()
        broken.view(words)[5] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(words)
        assert compute_checksums([broken]) != [sound], f"bit {bit}"


def test_which_replica_differs() -> None:
    def part(name: str, shard: int = 0) -> tuple[str, int, tuple[int, ...]]:
        return name, shard, ()

    sound = {part("a"): 1, part("b"): 2}
    assert find_differing_ranks([sound, sound, sound]) == {}
    assert find_differing_ranks([sound, {**sound, part("b"): 3}, sound]) == {1: (0, ["b"])}
    assert find_differing_ranks([{part("a"): 7, part("b"): 8}, sound, sound]) == {0: (1, ["a", "b"])}
    assert find_differing_ranks([sound, {**sound, part("a"): 3}]) == {1: (0, ["a"])}
    assert find_differing_ranks([{part("a", shard): shard} for shard in (0, 1)]) == {}, "different shards are different"


def test_a_flipped_bit_is_found_before_it_is_saved(tmp_path: Path, config: dict[str, Any]) -> None:
    guarded = merge_config(config, trainer={"check_replicas_interval": 2, "save_interval": 2, "deterministic": "require"})
    world = LocalWorld(tmp_path, guarded, 3, script="flipped_bit")
    assert world.wait() == [1, 1, 1]
    assert world.read_log().count("step 4: rank 1 on node0 has different values than rank 0 on node0, in model/norm.weight\n") == 3
    assert list_saved_steps(tmp_path) == [2]


def test_anomaly_mode_names_the_operation(tmp_path: Path, config: dict[str, Any]) -> None:
    wild = merge_config(config, learning_rate_scheduler={"learning_rate": 1e30}, trainer={"detect_anomaly": True})
    world = LocalWorld(tmp_path, wild, 1)
    assert world.wait() == [1]
    assert re.search(r"Backward\d*' returned nan values", world.read_log())
    assert "transformer.py" in world.read_log()


def test_values_that_are_not_finite_are_counted() -> None:
    inf, nan = float("inf"), float("nan")
    assert gradient_checks.count_non_finite_values({"a": torch.tensor([1.0, inf, -inf, nan]), "b": torch.ones(3)}) == {"a": 3}


@pytest.mark.usefixtures("reset_deterministic_mode")
def test_deterministic_mode_refuses_nondeterministic_operations() -> None:
    def put() -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))

    with gradient_checks.explain_torch_errors(7):
        put()
    _configure_determinism(torch.device("cpu"), DeterminismMode.prefer)
    put()
    _configure_determinism(torch.device("cpu"), DeterminismMode.require)
    with (
        pytest.raises(TrainingError, match=r"step 7: .*does not have a deterministic implementation") as caught,
        gradient_checks.explain_torch_errors(7),
    ):
        put()
    assert caught.value.hint
    with pytest.raises(RuntimeError, match="another"), gradient_checks.explain_torch_errors(7):
        raise RuntimeError("another")
