"""Guards: replicas that differ, values that are not finite, anomaly and deterministic mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import World, changed, steps_saved

from swarmtrain.config.trainer import Deterministic
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import checks, runtime
from swarmtrain.trainer.replicas import bit_sums, differences


@pytest.fixture
def free_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_and_no_order_shows_in_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    (sound,) = bit_sums([tensor])
    assert bit_sums([tensor.flip(0), tensor.view(8, 8).T]) == [sound, sound]
    for bit in range(8 * dtype.itemsize):
        broken = tensor.clone()
        broken.view(words)[5] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(words)
        assert bit_sums([broken]) != [sound], f"bit {bit}"


def test_who_differs() -> None:
    def part(name: str, shard: int = 0) -> tuple[str, int, tuple[int, ...]]:
        return name, shard, ()

    sound = {part("a"): 1, part("b"): 2}
    assert differences([sound, sound, sound]) == {}
    assert differences([sound, {**sound, part("b"): 3}, sound]) == {1: (0, ["b"])}
    assert differences([{part("a"): 7, part("b"): 8}, sound, sound]) == {0: (1, ["a", "b"])}
    assert differences([sound, {**sound, part("a"): 3}]) == {1: (0, ["a"])}
    assert differences([{part("a", shard): shard} for shard in (0, 1)]) == {}, "different shards are different"


def test_a_flipped_bit_is_found_before_it_is_saved(tmp_path: Path, config: dict[str, Any]) -> None:
    guarded = changed(config, trainer={"check_replicas_interval": 2, "save_interval": 2, "deterministic": "require"})
    world = World(tmp_path, guarded, 3, script="flipped_bit")
    assert world.wait() == [1, 1, 1]
    assert world.log().count("step 4: rank 1 on node0 has other numbers than rank 0 on node0, in model/norm.weight\n") == 3
    assert steps_saved(tmp_path) == [2]


def test_anomaly_mode_names_the_operation(tmp_path: Path, config: dict[str, Any]) -> None:
    wild = changed(config, learning_rate_scheduler={"learning_rate": 1e30}, trainer={"detect_anomaly": True})
    world = World(tmp_path, wild, 1)
    assert world.wait() == [1]
    assert re.search(r"Backward\d*' returned nan values", world.log())
    assert "transformer.py" in world.log()


def test_values_that_are_not_finite_are_counted() -> None:
    inf, nan = float("inf"), float("nan")
    assert checks.non_finite({"a": torch.tensor([1.0, inf, -inf, nan]), "b": torch.ones(3)}) == {"a": 3}


@pytest.mark.usefixtures("free_again")
def test_deterministic_mode_refuses_what_is_not() -> None:
    def put() -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))

    with checks.explained(7):
        put()
    runtime._be_deterministic(torch.device("cpu"), Deterministic.prefer)
    put()
    runtime._be_deterministic(torch.device("cpu"), Deterministic.require)
    with pytest.raises(TrainingError, match=r"step 7: .*does not have a deterministic implementation") as caught, checks.explained(7):
        put()
    assert caught.value.hint
    with pytest.raises(RuntimeError, match="another"), checks.explained(7):
        raise RuntimeError("another")
