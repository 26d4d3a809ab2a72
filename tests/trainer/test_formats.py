"""Token files of other programs: read as what was written, by either way of reading; what is torn or foreign is said."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swarmtrain.config.data import Format, Packing
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import Samples

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=32, reset_position_ids=True)
TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
TOKEN = 7
Documents = Sequence[Sequence[int]]
documents_of = some.lists(some.lists(some.integers(0, 31), max_size=9), min_size=1, max_size=12).filter(lambda each: any(map(len, each)))


def megatron(prefix: Path, documents: Sequence[Documents], code: int = 8) -> None:
    """Each document is sequences. As Megatron-LM's own writer puts them, one number after the other."""
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize(TYPES[code])
    ends = list(accumulate((len(document) for document in documents), initial=0))
    starts = list(accumulate((len(sequence) * width for sequence in sequences), initial=0))[:-1]
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{TYPES[code]}", token) for each in sequences for token in each))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
        + b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
        + b"".join(struct.pack("<q", start) for start in starts)
        + b"".join(struct.pack("<q", end) for end in ends)
    )


def llm_c(prefix: Path, tokens: Sequence[int], magic: int = 20240520, version: int = 1, letter: str = "H") -> None:
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    prefix.with_suffix(".bin").write_bytes(header + b"".join(struct.pack(f"<{letter}", token) for token in tokens))


def nanogpt(prefix: Path, tokens: Sequence[int]) -> None:
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack("<H", token) for token in tokens))


def read(prefix: Path, **how: object) -> list[list[int]]:
    """The documents of `prefix`, which are the same mapped and read."""
    found = []
    for use_mmap in (True, False):
        file = MemoryMap(prefix, use_mmap=use_mmap, **how)  # type: ignore[arg-type]
        file.check_documents()
        file.tokens.expect(0, len(file.tokens))
        found.append([file.tokens[start : start + count].tolist() for start, count in file.documents.tolist()])
    assert found[0] == found[1]
    return found[0]


def split(tokens: Sequence[int], *, after: bool) -> list[list[int]]:
    """One token at a time."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == TOKEN and not after:
            documents.append([])
        documents[-1].append(token)
        if token == TOKEN and after:
            documents.append([])
    return [document for document in documents if document]


@given(documents=some.lists(documents_of, min_size=1, max_size=5), code=some.sampled_from(sorted(TYPES)), modes=some.booleans())
@settings(max_examples=40, deadline=None)
def test_megatron(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], code: int, modes: bool) -> None:
    prefix = tmp_path_factory.mktemp("megatron") / "a"
    documents.insert(len(documents) // 2, [])
    megatron(prefix, documents, code)
    if modes:  # multimodal ones have these, and they say nothing of text
        with prefix.with_suffix(".idx").open("ab") as file:
            file.write(bytes(sum(map(len, documents))))
    assert read(prefix) == [[token for sequence in document for token in sequence] for document in documents]


@given(tokens=some.lists(some.integers(0, 31), min_size=2, max_size=60), after=some.booleans(), wide=some.booleans())
@settings(max_examples=60, deadline=None)
def test_files_without_an_index(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], after: bool, wide: bool) -> None:
    """nanoGPT ends a document with the token, llm.c begins it."""
    prefix = tmp_path_factory.mktemp("plain") / "a"
    if after:
        nanogpt(prefix, tokens)
    else:
        llm_c(prefix, tokens, *((20240801, 7, "I") if wide else ()))
    kind = Format.nanogpt if after else Format.auto
    assert read(prefix, format=kind) == [tokens]
    assert read(prefix, format=kind, document_token=TOKEN) == split(tokens, after=after)


@given(documents=documents_of, packing=some.sampled_from(list(Packing)))
@settings(max_examples=30, deadline=None)
def test_samples_are_those_of_our_own_files(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], packing: Packing) -> None:
    folder = tmp_path_factory.mktemp("samples")
    documents = [[1, 2, 3], *documents]
    memory_map.write(folder / "own", [np.array(document) for document in documents], "uint16")
    megatron(folder / "other", [[document] for document in documents])
    own, other = (Samples([folder / name], SHAPE, 0, packing=packing) for name in ("own", "other"))
    ids = np.arange(len(own))
    assert own.fingerprint == other.fingerprint
    assert all((one == two).all() for one, two in zip(own.load(ids), other.load(ids), strict=True))  # type: ignore[union-attr]


def test_other_ends_of_documents_are_other_data(tmp_path: Path) -> None:
    nanogpt(tmp_path / "a", list(range(20)))
    prints = {Samples([tmp_path / "a"], SHAPE, 0, format=Format.nanogpt, document_token=token).fingerprint for token in (None, 3, 4)}
    assert len(prints) == 3


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _put(path: Path, at: int, content: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + content + whole[at + len(content) :])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (lambda a: _put(a.with_suffix(".idx"), 9, b"\2"), "has version 2"),
    "real numbers": (lambda a: _put(a.with_suffix(".idx"), 17, b"\7"), "type 7, which is none of whole numbers"),
    "other type": (lambda a: _put(a.with_suffix(".idx"), 17, b"\4"), "its type of numbers, int32, puts them"),
    "header cut": (lambda a: _cut(a.with_suffix(".idx"), 20), "does not begin as Megatron's do"),
    "index cut": (lambda a: _cut(a.with_suffix(".idx"), 60), "has 60 bytes, and 82 are what its header says"),
    "tokens cut": (lambda a: _cut(a.with_suffix(".bin"), 6), "its index does not fit its tokens"),
    "half a token": (lambda a: _cut(a.with_suffix(".bin"), 7), "ends within a number"),
    "no tokens": (lambda a: _cut(a.with_suffix(".bin"), 0), "a.bin is empty"),
    "document outside": (lambda a: _put(a.with_suffix(".idx"), 74, b"\x09"), "documents that are not its 2 sequences"),
    "less than none": (lambda a: _put(a.with_suffix(".idx"), 34, b"\xff\xff\xff\xff"), "sequences that do not follow each other"),
    "two at once": (lambda a: a.with_suffix(".meta.json").write_text("{}"), "belongs to another .idx"),
    "a token to divide by": (lambda a: None, "has an index of its own"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("use_mmap", [True, False])
def test_torn_megatron(tmp_path: Path, name: str, use_mmap: bool) -> None:
    megatron(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    tear, said = WRONG[name]
    tear(tmp_path / "a")
    with pytest.raises(TrainingError, match=said) as error:
        MemoryMap(tmp_path / "a", use_mmap=use_mmap, document_token=TOKEN if "divide" in name else None)
    assert error.value.place == "config data"
    assert error.value.hint


@pytest.mark.parametrize(
    ("write", "format", "said"),
    [
        (lambda a: nanogpt(a, [1, 2, 3]), Format.auto, "has no header that says what it is"),
        (lambda a: llm_c(a, [1, 2, 3]), Format.nanogpt, "has the header of llm.c's"),
        (lambda a: nanogpt(a, [1, 2, 3]), Format.llm_c, "ends within its header"),
        (lambda a: nanogpt(a, [1] * 600), Format.llm_c, "begins with 65537 and 65537; llm.c's begin with 20240520 and 1"),
        (lambda a: llm_c(a, [1, 2, 3], version=2), Format.auto, "begins with 20240520 and 2"),
        (lambda a: (llm_c(a, [1, 2, 3]), _cut(a.with_suffix(".bin"), 1028)), Format.auto, "has 2 tokens, and its header says 3"),
        (lambda a: llm_c(a, []), Format.auto, "a.bin is empty"),
        (lambda a: nanogpt(a, [1, 2, 3]), Format.megatron, "a.idx: no such file"),
        (lambda a: None, Format.nanogpt, "a.bin: no such file"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, write: Callable[[Path], object], format: Format, said: str) -> None:
    write(tmp_path / "a")
    with pytest.raises(TrainingError, match=said) as error:
        MemoryMap(tmp_path / "a", format=format)
    assert error.value.hint


@pytest.mark.parametrize("packing", Packing)
def test_documents_outside_the_tokens(tmp_path: Path, packing: Packing) -> None:
    """What our own index says is looked at where it is used."""
    memory_map.write(tmp_path / "a", [np.arange(6), np.arange(6), np.arange(6)], "uint8")
    index = np.fromfile(tmp_path / "a.idx", dtype=np.int64)
    index[2:4] = (900, -7)
    index.tofile(tmp_path / "a.idx")
    with pytest.raises(TrainingError, match="document 1 is said to have -7 tokens from 900 on"):
        Samples([tmp_path / "a"], SHAPE, 0, packing=packing).load(np.arange(4))
