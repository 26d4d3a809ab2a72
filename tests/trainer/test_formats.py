"""Token files of other programs: read back as written, both mapped and read; corrupt and unsupported files are reported."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swarmtrain.config.schema.data import Packing, TokenFileFormat
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import TokenDataset

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=32, reset_position_ids=True)
MEGATRON_TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
END_TOKEN = 7
Documents = Sequence[Sequence[int]]
document_lists = some.lists(some.lists(some.integers(0, 31), max_size=9), min_size=1, max_size=12).filter(lambda each: any(map(len, each)))


def write_megatron(prefix: Path, documents: Sequence[Documents], code: int = 8) -> None:
    """Write documents, each a list of sequences, as Megatron-LM's own writer does, one number after the other."""
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize(MEGATRON_TYPES[code])
    ends = list(accumulate((len(document) for document in documents), initial=0))
    starts = list(accumulate((len(sequence) * width for sequence in sequences), initial=0))[:-1]
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{MEGATRON_TYPES[code]}", token) for each in sequences for token in each))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
        + b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
        + b"".join(struct.pack("<q", start) for start in starts)
        + b"".join(struct.pack("<q", end) for end in ends)
    )


def write_llm_c(prefix: Path, tokens: Sequence[int], magic: int = 20240520, version: int = 1, letter: str = "H") -> None:
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    prefix.with_suffix(".bin").write_bytes(header + b"".join(struct.pack(f"<{letter}", token) for token in tokens))


def write_nanogpt(prefix: Path, tokens: Sequence[int]) -> None:
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack("<H", token) for token in tokens))


def read_documents(prefix: Path, **options: object) -> list[list[int]]:
    """Return the documents of `prefix`, which must be the same mapped and read."""
    found = []
    for use_mmap in (True, False):
        file = MemoryMap(prefix, use_mmap=use_mmap, **options)  # type: ignore[arg-type]
        file.check_document_boundaries()
        file.tokens.prefetch_range(0, len(file.tokens))
        found.append([file.tokens[start : start + count].tolist() for start, count in file.documents.tolist()])
    assert found[0] == found[1]
    return found[0]


def split_documents(tokens: Sequence[int], *, after: bool) -> list[list[int]]:
    """Return the documents of `tokens`, split one token at a time."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == END_TOKEN and not after:
            documents.append([])
        documents[-1].append(token)
        if token == END_TOKEN and after:
            documents.append([])
    return [document for document in documents if document]


@given(documents=some.lists(document_lists, min_size=1, max_size=5), code=some.sampled_from(sorted(MEGATRON_TYPES)), modes=some.booleans())
@settings(max_examples=40, deadline=None)
def test_megatron(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], code: int, modes: bool) -> None:
    prefix = tmp_path_factory.mktemp("megatron") / "a"
    documents.insert(len(documents) // 2, [])
    write_megatron(prefix, documents, code)
    if modes:  # multimodal files have these modes, which do not affect text
        with prefix.with_suffix(".idx").open("ab") as file:
            file.write(bytes(sum(map(len, documents))))
    assert read_documents(prefix) == [[token for sequence in document for token in sequence] for document in documents]


@given(tokens=some.lists(some.integers(0, 31), min_size=2, max_size=60), after=some.booleans(), wide=some.booleans())
@settings(max_examples=60, deadline=None)
def test_files_without_an_index(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], after: bool, wide: bool) -> None:
    """nanoGPT ends a document with the token, llm.c begins a document with it."""
    prefix = tmp_path_factory.mktemp("plain") / "a"
    if after:
        write_nanogpt(prefix, tokens)
    else:
        write_llm_c(prefix, tokens, *((20240801, 7, "I") if wide else ()))
    kind = TokenFileFormat.nanogpt if after else TokenFileFormat.auto
    assert read_documents(prefix, format=kind) == [tokens]
    assert read_documents(prefix, format=kind, document_token=END_TOKEN) == split_documents(tokens, after=after)


@given(documents=document_lists, packing=some.sampled_from(list(Packing)))
@settings(max_examples=30, deadline=None)
def test_samples_are_those_of_our_own_files(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], packing: Packing) -> None:
    folder = tmp_path_factory.mktemp("samples")
    documents = [[1, 2, 3], *documents]
    memory_map.write_token_files(folder / "own", [np.array(document) for document in documents], "uint16")
    write_megatron(folder / "other", [[document] for document in documents])
    own, other = (TokenDataset([folder / name], SHAPE, 0, packing=packing) for name in ("own", "other"))
    ids = np.arange(len(own))
    assert own.fingerprint == other.fingerprint
    assert all((one == two).all() for one, two in zip(own.load_samples(ids), other.load_samples(ids), strict=True))  # type: ignore[union-attr]


def test_other_document_ends_are_other_data(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a", list(range(20)))
    prints = {
        TokenDataset([tmp_path / "a"], SHAPE, 0, format=TokenFileFormat.nanogpt, document_token=token).fingerprint for token in (None, 3, 4)
    }
    assert len(prints) == 3


def _truncate_file(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _overwrite_bytes(path: Path, at: int, content: bytes) -> None:
    original = path.read_bytes()
    path.write_bytes(original[:at] + content + original[at + len(content) :])


CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (lambda a: _overwrite_bytes(a.with_suffix(".idx"), 9, b"\2"), "has version 2"),
    "real numbers": (lambda a: _overwrite_bytes(a.with_suffix(".idx"), 17, b"\7"), "dtype code 7, which is not an integer dtype"),
    "other type": (lambda a: _overwrite_bytes(a.with_suffix(".idx"), 17, b"\4"), "do not match the dtype int32"),
    "header cut": (lambda a: _truncate_file(a.with_suffix(".idx"), 20), "does not begin with Megatron's header"),
    "index cut": (lambda a: _truncate_file(a.with_suffix(".idx"), 60), "has 60 bytes, but its header specifies 82"),
    "tokens cut": (lambda a: _truncate_file(a.with_suffix(".bin"), 6), "its index does not match its tokens"),
    "half a token": (lambda a: _truncate_file(a.with_suffix(".bin"), 7), "is not a multiple of the size of"),
    "no tokens": (lambda a: _truncate_file(a.with_suffix(".bin"), 0), "a.bin is empty"),
    "document outside": (lambda a: _overwrite_bytes(a.with_suffix(".idx"), 74, b"\x09"), "documents that do not match its 2 sequences"),
    "less than none": (
        lambda a: _overwrite_bytes(a.with_suffix(".idx"), 34, b"\xff\xff\xff\xff"),
        "the sequences are not contiguous",
    ),
    "two at once": (lambda a: a.with_suffix(".meta.json").write_text("{}"), "belongs to an .idx of the memory_map format"),
    "a token to divide by": (lambda a: None, "has an index"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("use_mmap", [True, False])
def test_corrupt_megatron_files(tmp_path: Path, name: str, use_mmap: bool) -> None:
    write_megatron(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    tear, said = CORRUPTIONS[name]
    tear(tmp_path / "a")
    with pytest.raises(TrainingError, match=said) as error:
        MemoryMap(tmp_path / "a", use_mmap=use_mmap, document_token=END_TOKEN if "divide" in name else None)
    assert error.value.place == "config data"
    assert error.value.hint


@pytest.mark.parametrize(
    ("write", "format", "message"),
    [
        (lambda a: write_nanogpt(a, [1, 2, 3]), TokenFileFormat.auto, "has no header that identifies its format"),
        (lambda a: write_llm_c(a, [1, 2, 3]), TokenFileFormat.nanogpt, "has an llm.c header"),
        (lambda a: write_nanogpt(a, [1, 2, 3]), TokenFileFormat.llm_c, "ends within its header"),
        (
            lambda a: write_nanogpt(a, [1] * 600),
            TokenFileFormat.llm_c,
            "begins with 65537 and 65537; llm.c files begin with 20240520 and 1",
        ),
        (lambda a: write_llm_c(a, [1, 2, 3], version=2), TokenFileFormat.auto, "begins with 20240520 and 2"),
        (
            lambda a: (write_llm_c(a, [1, 2, 3]), _truncate_file(a.with_suffix(".bin"), 1028)),
            TokenFileFormat.auto,
            "has 2 tokens, but its header specifies 3",
        ),
        (lambda a: write_llm_c(a, []), TokenFileFormat.auto, "a.bin is empty"),
        (lambda a: write_nanogpt(a, [1, 2, 3]), TokenFileFormat.megatron, "a.idx: no such file"),
        (lambda a: None, TokenFileFormat.nanogpt, "a.bin: no such file"),
    ],
)
def test_what_cannot_be_read_is_reported(tmp_path: Path, write: Callable[[Path], object], format: TokenFileFormat, message: str) -> None:
    write(tmp_path / "a")
    with pytest.raises(TrainingError, match=message) as error:
        MemoryMap(tmp_path / "a", format=format)
    assert error.value.hint


@pytest.mark.parametrize("packing", Packing)
def test_documents_outside_the_tokens(tmp_path: Path, packing: Packing) -> None:
    """Entries of our own index are checked when they are used."""
    memory_map.write_token_files(tmp_path / "a", [np.arange(6), np.arange(6), np.arange(6)], "uint8")
    index = np.fromfile(tmp_path / "a.idx", dtype=np.int64)
    index[2:4] = (900, -7)
    index.tofile(tmp_path / "a.idx")
    with pytest.raises(TrainingError, match="document 1 has -7 tokens, starting at token 900"):
        TokenDataset([tmp_path / "a"], SHAPE, 0, packing=packing).load_samples(np.arange(4))
