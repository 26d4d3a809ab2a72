"""Token files, samples, their order, and the datasets of datautils."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import datautils
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map, shuffle, token_file
from swarmtrain.trainer.data.samples import TokenDataset

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=32)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**62))
@settings(max_examples=50, deadline=None)
def test_an_epoch_has_each_sample_once(size: int, key: int) -> None:
    assert sorted(shuffle.permute_indices(np.arange(size), size, key)) == list(range(size))


def test_order_is_known_at_any_position() -> None:
    whole = shuffle.compute_sample_ids(0, 1000, 300, seed=1)
    assert list(shuffle.compute_sample_ids(430, 250, 300, seed=1)) == list(whole[430:680])
    assert list(whole[:300]) != list(whole[300:600]), "each epoch has an order of its own"
    assert list(whole) != list(shuffle.compute_sample_ids(0, 1000, 300, seed=2))


def test_order_does_not_change_between_releases() -> None:
    """A run must be able to resume after an update: these values are part of the checkpoint format."""
    assert list(shuffle.compute_sample_ids(0, 8, 100, seed=42)) == [7, 5, 70, 97, 73, 2, 12, 39]


def test_seeking_far_is_cheap() -> None:
    assert len(shuffle.compute_sample_ids(10**15, 4, 10**12, seed=0)) == 4


def test_samples_are_windows(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(7), np.arange(7, 11)], "uint16")
    memory_map.write_token_files(tmp_path / "b", [np.arange(20, 25)], "uint16")
    data = TokenDataset([tmp_path / "a", tmp_path / "b"], SHAPE, seed=0)
    assert len(data) == 4
    inputs, targets, _ = data.load_samples(np.arange(4))
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [20, 21, 22, 23]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -1, -1], [21, 22, 23, 24]]
    assert data.build_batch(0, 4).loss_tokens == 14
    assert data.build_batch(0, 8).loss_tokens == 28


def test_batches_are_assigned_without_gap_or_overlap(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.zeros(1000)], "uint8")
    batch = TokenDataset([tmp_path / "a"], SHAPE, 0).build_batch(24, 12)
    dealt = [batch.select_micro_batches((2, 2, 1, 1, 0), replica, 2) for replica in range(5)]
    assert [number for part in dealt for number, _ in part] == list(range(6))
    assert [sample for part in dealt for _, ids in part for sample in ids] == list(batch.ids)


def test_token_outside_the_vocabulary(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.full(10, 40)], "uint8")
    with pytest.raises(TrainingError, match="the data contains token 40"):
        TokenDataset([tmp_path / "a"], SHAPE, 0).load_samples(np.arange(1))


@pytest.mark.parametrize("ending", ["bin", "idx", "meta.json"])
def test_missing_file_is_named(tmp_path: Path, ending: str) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.zeros(10)], "uint8")
    (tmp_path / f"a.{ending}").unlink()
    with pytest.raises(TrainingError, match=rf"a\.{ending}: no such file"):
        TokenDataset([tmp_path / "a"], SHAPE, 0)


def test_a_corrupt_token_file(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.zeros(10), np.zeros(10)], "uint8")
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(TrainingError, match="one of the files is corrupt"):
        TokenDataset([tmp_path / "a"], SHAPE, 0)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_files_that_are_read_equal_those_that_are_mapped(tmp_path: Path, dtype: str) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(7), np.arange(7, 31)], dtype)
    mapped, read = (TokenDataset([tmp_path / "a"], SHAPE, 0, use_mmap=use_mmap) for use_mmap in (True, False))
    read.prefetch_samples(np.arange(4))
    assert read.fingerprint == mapped.fingerprint
    assert all(
        (one == other).all() for one, other in zip(read.load_samples(np.arange(4))[:2], mapped.load_samples(np.arange(4))[:2], strict=True)
    )


def test_a_file_that_is_read_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    array = token_file.PreadArray(path, np.dtype(np.uint8))
    descriptor = array._descriptor
    assert len(array[:]) == 8
    del array
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_read_that_fails_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system goes stale here, so the call that would report it is replaced: it fails until the file is reopened."""
    memory_map.write_token_files(tmp_path / "a", [np.arange(20)], "uint8")
    data = TokenDataset([tmp_path / "a"], SHAPE, 0, use_mmap=False)
    stale, sound = data.token_files[0].tokens._descriptor, os.pread  # type: ignore[union-attr]  # read, not mapped

    def pread(file: int, size: int, start: int) -> bytes:
        if file == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return sound(file, size, start)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(token_file, "_RETRY_DELAYS_SECONDS", (0.0,))
    assert data.load_samples(np.arange(1)).inputs.tolist() == [[0, 1, 2, 3]]
    monkeypatch.setattr(token_file, "_RETRY_DELAYS_SECONDS", ())
    stale = data.token_files[0].tokens._descriptor  # type: ignore[union-attr]
    with pytest.raises(TrainingError, match=r"[Ss]tale"):
        data.load_samples(np.arange(1))


def test_other_data_has_another_fingerprint(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 32, 5000)
    for name, values in (("a", tokens), ("b", tokens), ("c", np.append(tokens[:-1], (tokens[-1] + 1) % 32))):
        memory_map.write_token_files(tmp_path / name, [values], "uint8")
    a, b, c = (TokenDataset([tmp_path / name], SHAPE, 0).fingerprint for name in "abc")
    assert a == b != c


def _write_python_sources(folder: str) -> None:
    datautils.write_python_sources(Path(folder) / "train", Path(folder) / "heldout")


@pytest.mark.test_all_only("tokenizes the standard library twice; make demo trains on it")
def test_python_sources(tmp_path: Path) -> None:
    """Two processes at once, as with two nodes on one machine: both succeed, and the files are complete."""
    processes = [multiprocessing.get_context("spawn").Process(target=_write_python_sources, args=(str(tmp_path),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    training, validation = memory_map.MemoryMap(tmp_path / "train"), memory_map.MemoryMap(tmp_path / "heldout")
    share = len(validation.tokens) / (len(validation.tokens) + len(training.tokens))
    assert 0.05 < share < 0.15
    assert len(training.tokens) > 5_000_000
    start, length = training.documents[3]
    document = bytes(training.tokens[start : start + length])
    compile(document, "a document is a file of the library", "exec")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin", ".idx", ".idx", ".json", ".json"]
    written = (tmp_path / "train.bin").stat().st_mtime_ns
    datautils.write_python_sources(tmp_path / "train", tmp_path / "heldout")
    assert (tmp_path / "train.bin").stat().st_mtime_ns == written, "made once"


def test_bigram_loss_by_hand(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "train", [np.frombuffer(b"abab", dtype=np.uint8)], "uint8")
    memory_map.write_token_files(tmp_path / "heldout", [np.frombuffer(b"aba", dtype=np.uint8)], "uint8")
    after_a, after_b = 3 / 258, 2 / 257
    assert datautils.compute_bigram_loss(tmp_path / "train", tmp_path / "heldout") == pytest.approx(
        -(math.log(after_a) + math.log(after_b)) / 2
    )
