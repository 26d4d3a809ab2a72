"""Tokens outside the vocabulary are found before the first step, wherever in a file they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import LocalWorld, merge_config, read_samples_by_step, run_training

from swarmtrain.config import Config
from swarmtrain.errors import DataError
from swarmtrain.trainer import start_runtime
from swarmtrain.trainer.data import memory_map, vocabulary_check
from swarmtrain.trainer.data.memory_map import MemoryMap

TOKEN_COUNT, BAD_POSITION = 5 << 20, (5 << 19) + 17
"""Number of tokens in a file, and the position of the bad one: far from both ends, of which each run reads the first and last MiB."""


def write_tokens(prefix: Path, *, bad: bool) -> None:
    """Write zeros and one token 63, or 64 if `bad`."""
    tokens = np.zeros(TOKEN_COUNT, dtype=np.uint8)
    tokens[BAD_POSITION] = 64 if bad else 63
    memory_map.write_token_files(prefix, [tokens], "uint8")


def read_record(folder: Path) -> dict[str, int]:
    """Return the scan record of the only file."""
    (seen,) = json.loads((folder / "run" / "token-scan.json").read_text()).values()
    return dict(seen)


def test_a_file_is_checked_once(config: Mapping[str, Any], tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    write_tokens(prefix, bad=True)
    data = {"data_prefixes": [str(prefix)], "validation_data_prefixes": []}
    base = merge_config(config, data=data, trainer={"train_iterations": 1, "save_interval": None})
    world = LocalWorld(tmp_path, base, 2)
    assert world.wait() == [1, 1]
    message = f"config transformer_architecture.vocab_size: is 64, but the data contains token 64: {prefix}, at position {BAD_POSITION:,}"
    assert world.read_log().count(f"DataError: {message}") == 2, "each rank raises it"
    assert not read_samples_by_step(tmp_path), "no step was made"
    assert not (tmp_path / "run" / "token-scan.json").exists()

    write_tokens(prefix, bad=False)
    run_training(tmp_path, base, 2)
    seen = read_record(tmp_path)
    assert (seen["size"], seen["scanned_bytes"], seen["highest_token"]) == (TOKEN_COUNT, TOKEN_COUNT, 63), (
        "both ranks together have seen all of it"
    )

    write_tokens(prefix, bad=True)
    os.utime(prefix.with_name("tokens.bin"), ns=(seen["modified"],) * 2)
    run_training(tmp_path, merge_config(base, trainer={"train_iterations": 2}))
    assert read_record(tmp_path) == seen, "a file that is as it was is not looked at again"
    os.utime(prefix.with_name("tokens.bin"))
    world = LocalWorld(tmp_path, merge_config(base, trainer={"train_iterations": 3}), 1)
    assert world.wait() == [1]
    assert message in world.read_log()


def test_a_file_that_is_too_large_is_sampled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokens(tmp_path / "tokens", bad=True)
    file, shape = MemoryMap(tmp_path / "tokens"), {"vocab_size": 64}
    with start_runtime(Config.model_validate({"transformer_architecture": shape})) as rank_runtime:
        vocabulary_check.LOG.propagate = True
        vocabulary_check.scan_token_files(rank_runtime, [file], max_seconds=-1)
        assert "scanned 0 % of the data for tokens outside the vocabulary" in caplog.text
        with pytest.raises(DataError, match=f"at position {BAD_POSITION:,}"):
            vocabulary_check.scan_token_files(rank_runtime, [file])


def test_a_negative_token_is_outside() -> None:
    assert vocabulary_check.check_tokens(np.array([0, 7], dtype=np.int32), 8) == 7
    with pytest.raises(DataError, match="the data contains token -1: x, at position 12"):
        vocabulary_check.check_tokens(np.array([0, 7, -1], dtype=np.int32), 8, ": x", 10)


@pytest.mark.parametrize(("dtype", "size", "has"), [("uint16", 65536, False), ("uint16", 65535, True), ("int64", 2**60, True)])
def test_a_file_whose_dtype_fits_the_vocabulary_is_not_checked(dtype: str, size: int, has: bool) -> None:
    assert vocabulary_check.can_exceed_vocabulary(np.dtype(dtype), size) is has
