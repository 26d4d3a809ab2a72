"""Tokens outside the vocabulary are found before the first step, wherever in a file they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World, changed, samples_by_step, train

from swarmtrain.config import Config
from swarmtrain.errors import DataError
from swarmtrain.trainer import runtime
from swarmtrain.trainer.data import memory_map, vocabulary
from swarmtrain.trainer.data.memory_map import MemoryMap

COUNT, BAD = 5 << 20, (5 << 19) + 17
"""Tokens of a file, and the position of one in it, far from both ends, of which each run reads the first and last MiB."""


def write(prefix: Path, *, bad: bool) -> None:
    """Write zeros, and the token 64 among them if it is to be `bad`."""
    tokens = np.zeros(COUNT, dtype=np.uint8)
    tokens[BAD] = 64 if bad else 63
    memory_map.write(prefix, [tokens], "uint8")


def record(folder: Path) -> dict[str, int]:
    """Return what is remembered of the only file."""
    (seen,) = json.loads((folder / "run" / "tokens-seen.json").read_text()).values()
    return dict(seen)


def test_a_file_is_looked_through_once(config: Mapping[str, Any], tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    write(prefix, bad=True)
    data = {"data_prefixes": [str(prefix)], "validation_data_prefixes": []}
    base = changed(config, data=data, trainer={"train_iterations": 1, "save_interval": None})
    world = World(tmp_path, base, 2)
    assert world.wait() == [1, 1]
    told = f"config transformer_architecture.vocab_size: is 64, and token 64 is in the data: {prefix}, at position {BAD:,}"
    assert world.log().count(f"DataError: {told}") == 2, "each rank raises it"
    assert not samples_by_step(tmp_path), "no step was made"
    assert not (tmp_path / "run" / "tokens-seen.json").exists()

    write(prefix, bad=False)
    train(tmp_path, base, 2)
    seen = record(tmp_path)
    assert (seen["size"], seen["looked_at"], seen["highest"]) == (COUNT, COUNT, 63), "both ranks together have seen all of it"

    write(prefix, bad=True)
    os.utime(prefix.with_name("tokens.bin"), ns=(seen["modified"],) * 2)
    train(tmp_path, changed(base, trainer={"train_iterations": 2}))
    assert record(tmp_path) == seen, "a file that is as it was is not looked at again"
    os.utime(prefix.with_name("tokens.bin"))
    world = World(tmp_path, changed(base, trainer={"train_iterations": 3}), 1)
    assert world.wait() == [1]
    assert told in world.log()


def test_a_file_that_is_too_large_is_sampled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "tokens", bad=True)
    file, shape = MemoryMap(tmp_path / "tokens"), {"vocab_size": 64}
    with runtime.start(Config.model_validate({"transformer_architecture": shape})) as here:
        vocabulary.LOG.propagate = True
        vocabulary.look_through(here, [file], seconds=-1)
        assert "looked at 0 % of the data for tokens outside the vocabulary" in caplog.text
        with pytest.raises(DataError, match=f"at position {BAD:,}"):
            vocabulary.look_through(here, [file])


def test_what_is_negative_is_outside() -> None:
    assert vocabulary.check(np.array([0, 7], dtype=np.int32), 8) == 7
    with pytest.raises(DataError, match="token -1 is in the data: x, at position 12"):
        vocabulary.check(np.array([0, 7, -1], dtype=np.int32), 8, ": x", 10)


@pytest.mark.parametrize(("dtype", "size", "has"), [("uint16", 65536, False), ("uint16", 65535, True), ("int64", 2**60, True)])
def test_what_its_type_has_no_room_for_is_not_looked_for(dtype: str, size: int, has: bool) -> None:
    assert vocabulary.has_room(np.dtype(dtype), size) is has
