"""Reading a checkpoint: each tensor gets its values however it is divided, in one pass over files that are verified at the same time."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import file_digests
from swarmtrain.trainer.checkpoint import manifest as manifests
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, FileHasher
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import tensor_reader
from swarmtrain.trainer.checkpoint.storage.tensor_reader import (
    DamagedFiles,
    FileVerification,
    TensorStorageReader,
    assign_files_to_verify,
    load_tensors,
)

SHAPES = {"matrix": (7, 6), "vector": (5,), "scalar": (), "words": (3, 4), "empty": (0, 4)}
DTYPES = {"words": torch.int64}


@pytest.fixture(autouse=True, params=[16, 48], ids=lambda size: f"pieces of {size} bytes")
def _read_small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 bytes: tensors of a few numbers take several."""
    monkeypatch.setattr(tensor_reader, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(file_digests, "_PIECE_BYTES", request.param)


def write_checkpoint(folder: Path, *, files: int = 3, whole: bool = False) -> tuple[Manifest, dict[str, Tensor]]:
    """Write tensors whose rows are divided among `files` files, with gaps between them. Return the manifest and the tensors.

    `whole`: the manifest has digests of whole files, as before format 3.
    """
    values = {
        name: torch.arange(torch.Size(shape).numel()).view(shape).to(DTYPES.get(name, torch.float32)) + 1 for name, shape in SHAPES.items()
    }
    contents = [bytearray(b"\0" * 8) for _ in range(files)]
    index: dict[str, Any] = {}
    for name, tensor in values.items():
        parts = tensor.chunk(files) if tensor.dim() else (tensor,)
        chunks, row = [], 0
        for number, part in enumerate(parts):
            offsets = [row, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            content = contents[number]
            chunks.append({"offsets": offsets, "sizes": list(part.shape), "file": f"part-{number}.bin", "offset": len(content)})
            content += part.contiguous().numpy().tobytes() + b"\0" * 24
            row += len(part) if tensor.dim() else 0
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape), "chunks": chunks}
    digests: FileDigests = {}
    for number, content in enumerate(contents):
        (folder / f"part-{number}.bin").write_bytes(content)
        new = file_digests.hash_memory(memoryview(content)).build_entry(len(content))
        digests[f"part-{number}.bin"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} if whole else new
    return Manifest(1, 1, 0, None, "", {}, {}, digests, index, {}), values


def verify_alone(manifest: Manifest) -> FileVerification:
    return FileVerification(manifest.files, [[0]])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_tensors_of_any_layout_get_their_values(tmp_path: Path, *, verify: bool, whole: bool) -> None:
    """Some are read in place; one is not contiguous, and one has another type."""
    manifest, expected = write_checkpoint(tmp_path, whole=whole)
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    targets["matrix"] = torch.zeros(6, 7).t()
    targets["vector"] = torch.zeros(5, dtype=torch.bfloat16)
    versions = {name: target._version for name, target in targets.items()}
    load_tensors(dict(targets), tmp_path, manifest, verify_alone(manifest) if verify else None, is_collective=False)
    for name, target in targets.items():
        assert torch.equal(target.to(expected[name].dtype), expected[name]), name
        assert target._version > versions[name] or not target.numel(), "weights that are cast from it would not follow"


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans())
def test_any_part_of_a_chunk_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, verify: bool) -> None:
    """Parts as a planner asks for them when the topology has changed: some rows and columns of a chunk, several times."""
    folder = tmp_path_factory.mktemp("parts")
    manifest, expected = write_checkpoint(folder, files=1)
    reader = TensorStorageReader(folder, manifest.tensors, manifest.files)
    targets: dict[ReadItem, Tensor] = {}
    for number in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(["matrix", "vector", "words"]))
        bounds = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in SHAPES[name]]
        starts, lengths = (torch.Size(values) for values in zip(*((low, high - low) for low, high in bounds), strict=True))
        source = MetadataIndex(name, torch.Size([0] * len(starts)))
        item = ReadItem(LoadItemType.TENSOR, MetadataIndex(f"{name} {number}"), torch.Size([0] * len(starts)), source, starts, lengths)
        targets[item] = torch.zeros(lengths, dtype=expected[name].dtype)

    class Planner:
        def resolve_tensor(self, item: ReadItem) -> Tensor:
            return targets[item]

        def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None: ...

    reader.read_items(list(targets), Planner(), manifest.files if verify else ())  # type: ignore[arg-type]  # it uses these two methods only
    for item, target in targets.items():
        ranges = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
        assert torch.equal(target, expected[item.storage_index.fqn][ranges])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("position", [0, 40, -1], ids=["gap", "tensor", "end"])
@pytest.mark.parametrize("name", ["part-0.bin", "part-2.bin"])
def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path, name: str, position: int, *, whole: bool) -> None:
    """Also in a file from which nothing is read: part-2.bin has no row of the tensor that is loaded."""
    manifest, _ = write_checkpoint(tmp_path, whole=whole)
    manifests.verify_files(tmp_path, manifest, manifest.files)
    content = bytearray((tmp_path / name).read_bytes())
    content[position] ^= 1
    (tmp_path / name).write_bytes(content)
    tensors = {"scalar": torch.zeros(())}
    load_tensors(dict(tensors), tmp_path, manifest, is_collective=False)
    with pytest.raises(DamagedFiles, match=f"{name} is corrupt: its SHA-256 does not match"):
        load_tensors(tensors, tmp_path, manifest, verify_alone(manifest), is_collective=False)
    with pytest.raises(CheckpointError, match=f"{name} is corrupt: its SHA-256 does not match"):
        manifests.verify_files(tmp_path, manifest, manifest.files)


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, *, verify: bool) -> None:
    manifest, expected = write_checkpoint(tmp_path)
    path, verification = tmp_path / "part-1.bin", verify_alone(manifest) if verify else None
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:20])
    reason = f"part-1.bin has 20 bytes instead of {size}" if verify else "part-1.bin is truncated"
    with pytest.raises(DamagedFiles, match=reason):
        load_tensors(
            {name: torch.zeros_like(tensor) for name, tensor in expected.items()}, tmp_path, manifest, verification, is_collective=False
        )
    path.unlink()
    with pytest.raises(DamagedFiles, match=r"part-1.bin cannot be read: no such file"):
        load_tensors(
            {name: torch.zeros_like(tensor) for name, tensor in expected.items()}, tmp_path, manifest, verification, is_collective=False
        )


def test_blocks_that_arrive_in_parts_and_in_another_order_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, expected = write_checkpoint(tmp_path, files=1)
    read, arrivals = os.preadv, []

    def read_slowly(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, [buffers[0][:5]], offset)
        time.sleep(0.002 * (3 - offset // 16 % 4))
        arrivals.append(offset)
        return count

    monkeypatch.setattr(os, "preadv", read_slowly)
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_tensors(dict(targets), tmp_path, manifest, verify_alone(manifest), is_collective=False)
    assert arrivals != sorted(arrivals)
    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    """A file is read once from its beginning to its end, so a second tensor at the same place would get other bytes."""
    manifest, expected = write_checkpoint(tmp_path, files=1)
    [chunk] = manifest.tensors["vector"]["chunks"]
    chunk["offset"] = manifest.tensors["matrix"]["chunks"][0]["offset"] + 4
    tensors = {name: torch.zeros_like(expected[name]) for name in ("matrix", "vector")}
    with pytest.raises(DamagedFiles, match="tensors overlap at byte"):
        load_tensors(tensors, tmp_path, manifest, verify_alone(manifest), is_collective=False)


def test_each_group_verifies_each_file_once_and_prefers_those_who_read_it(tmp_path: Path) -> None:
    manifest, _ = write_checkpoint(tmp_path)
    names_by_rank = [{"part-0.bin"}, {"part-1.bin", "part-2.bin"}, {"part-0.bin"}]
    verified_names = assign_files_to_verify(FileVerification(manifest.files, [[0, 1], [2]]), names_by_rank)
    assert verified_names == [["part-0.bin"], ["part-1.bin", "part-2.bin"], sorted(manifest.files)]


def test_file_sizes_tell_a_torn_checkpoint_without_reading_it(tmp_path: Path) -> None:
    manifest, _ = write_checkpoint(tmp_path)
    assert manifests.has_right_file_sizes(tmp_path, manifest)
    (tmp_path / "part-1.bin").write_bytes(b"")
    assert not manifests.has_right_file_sizes(tmp_path, manifest)
    (tmp_path / "part-1.bin").unlink()
    assert not manifests.has_right_file_sizes(tmp_path, manifest)


@given(st.binary(max_size=200), st.lists(st.integers(1, 60)))
def test_the_digest_is_the_hash_of_the_hashes_of_the_pieces(content: bytes, lengths: list[int]) -> None:
    """As the text of the module says, in whatever parts the bytes arrive; threads find the same."""
    size = file_digests._PIECE_BYTES
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    entry = file_digests.hash_memory(memoryview(content)).build_entry(len(content))
    assert entry == {"size": len(content), "sha256_of_pieces": expected}
    assert file_digests.get_digest(entry) == expected
    for known in (entry, {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}):
        hasher, rest = FileHasher(known), memoryview(content)
        for length in lengths:
            hasher.update(rest[:length])
            rest = rest[length:]
        assert hasher.matches() == (not rest)
        hasher.update(rest)
        assert hasher.matches()
