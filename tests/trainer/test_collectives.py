"""Values that ranks exchange: JSON that keeps each value and its type, and no pickle."""

from __future__ import annotations

import json
import math
import struct
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import LocalWorld, merge_config, read_losses

from swarmtrain.trainer import collectives

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(width=64) | st.text() | st.text("ab/\udcff").map(Path)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values)
        | st.lists(values).map(tuple)
        | st.sets(SCALARS)
        | st.dictionaries(SCALARS | st.tuples(st.text(), st.integers()), values)
    ),
)


def describe(value: Any) -> Any:
    """Return a text that is equal for values of the same type whose bits are equal."""
    if isinstance(value, float):
        return f"float {'nan' if math.isnan(value) else struct.pack('d', value).hex()}"
    if isinstance(value, dict):
        return f"dict {[(describe(key), describe(each)) for key, each in value.items()]}"
    if isinstance(value, set):
        return f"set {sorted(describe(each) for each in value)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[describe(each) for each in value]}"
    return f"{type(value).__name__} {value!r}"


@given(VALUES)
def test_values_and_their_types_survive_the_exchange(value: Any) -> None:
    """Also NaN, infinity, -0.0, large integers, and paths whose bytes are not UTF-8."""
    assert describe(collectives.decode_value(json.loads(json.dumps(collectives.encode_value(value))))) == describe(value)


class Word(StrEnum):
    word = "word"


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize("value", [Word.word, Pair(1, 2), {"a": [object()]}, b"bytes", 1j], ids=lambda value: type(value).__name__)
def test_a_type_that_would_change_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        collectives.encode_value(value)


def test_all_ranks_receive_the_values_and_errors_of_other_ranks(tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, {}, 3, script="exchanged_values")
    assert world.wait() == [0] * 3, world.read_log()


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [
        ({"data_parallel_type": "fsdp"}, ()),
        ({"model_parallel_size": 2}, ()),
        ({"pipe_parallel_size": 2}, ()),
        ({}, ("a", "b")),
    ],
    ids=["fsdp", "tensor parallel", "pipeline", "own disks"],
)
def test_ranks_unpickle_nothing_that_they_receive(
    tmp_path: Path, config: dict[str, Any], topology: dict[str, Any], nodes: tuple[str, ...]
) -> None:
    """From the start to the checkpoint, and when the run resumes from it."""
    for steps in (2, 4):
        short = merge_config(config, topology=topology, trainer={"train_iterations": steps})
        world = LocalWorld(tmp_path, short, 2, script="without_unpickling", nodes=nodes)
        assert world.wait() == [0, 0], world.read_log()
    if not nodes:
        assert list(read_losses(tmp_path)) == [1, 2, 3, 4]
