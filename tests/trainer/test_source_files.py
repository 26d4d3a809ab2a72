"""Source files of every format, compressed or not, give the same token files as JSONL; what cannot be read is an error with its place."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenize_helpers import read_documents

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize import pipeline
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions

COMPRESSIONS = {"": None, ".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
ROWS = [{"id": str(number), "text": text} for number, text in enumerate(["a", "é\n", 'say "x", y', "\t漢", "last"])]


def write_table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def write_parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=2)
    return stream.getvalue()


FORMATS: dict[str, Any] = {
    ".jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),  # without a newline at the end
    ".ndjson": lambda rows: "".join(f"{json.dumps(row)}\r\n" for row in rows).encode(),
    ".json": lambda rows: json.dumps(rows, indent=2).encode("utf-8-sig"),
    ".csv": lambda rows: write_table(rows, ","),
    ".tsv": lambda rows: b"\xef\xbb\xbf" + write_table(rows, "\t"),
    ".parquet": write_parquet,
}


def write_file(path: Path, content: bytes, compression: str | None) -> str:
    if compression:
        with pyarrow.CompressedOutputStream(str(path), compression) as stream:
            stream.write(content)
    else:
        path.write_bytes(content)
    return str(path)


def tokenize(path: str, **changes: Any) -> list[list[int]]:
    prefix = Path(f"{path}.tokens")
    pipeline.tokenize_source_files(TokenizeOptions(**{"prefix": str(prefix), "tokenizer": "bytes", "workers": 2, **changes}), [path])
    return read_documents(prefix)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_every_format_gives_the_same_documents(tmp_path: Path, suffix: str, ending: str) -> None:
    path = write_file(tmp_path / f"a{suffix}{ending}", FORMATS[suffix](ROWS), COMPRESSIONS[ending])
    if suffix == ".parquet" and ending:
        with pytest.raises(TrainingError, match="files of this format are not read"):
            tokenize(path)
    else:
        assert tokenize(path) == [list(row["text"].encode()) for row in ROWS]


@given(
    texts=some.lists(some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1),
    suffix=some.sampled_from([".csv", ".tsv", ".json", ".jsonl"]),
)
@settings(max_examples=20, deadline=None)
def test_any_text_in_any_format(tmp_path_factory: pytest.TempPathFactory, texts: list[str], suffix: str) -> None:
    path = write_file(tmp_path_factory.mktemp("any") / f"a{suffix}", FORMATS[suffix]([{"text": text} for text in texts]), None)
    assert tokenize(path, workers=1) == [list(text.encode()) for text in texts]


def test_nested_keys(tmp_path: Path) -> None:
    rows = [{"meta": {"text": "a", "more": {"title": "b"}}}, {"meta": {"text": "c", "more": {"title": "d"}}}]
    for suffix in (".jsonl", ".json", ".parquet"):
        path = write_file(tmp_path / f"a{suffix}", FORMATS[suffix](rows), None)
        assert tokenize(path, key="meta.text") == [[*b"a"], [*b"c"]]
        assert tokenize(path, prompt_key="meta.text", completion_key="meta.more.title") == [[*b"ab"], [*b"cd"]]
    with pytest.raises(TrainingError, match=r"a\.jsonl line 1: has no key 'meta.title'; its keys: 'meta'"):
        tokenize(str(tmp_path / "a.jsonl"), key="meta.title")
    assert tokenize(write_file(tmp_path / "b.jsonl", b'{"a.b": "x", "a": {"b": "y"}}', None), key="a.b") == [[*b"x"]]


def test_conversations_in_a_table_and_in_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    expected = [[*b"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"]]
    files = {
        "a.csv": write_table([{"id": 1, "messages": json.dumps(messages)}], ","),
        "a.parquet": write_parquet([{"id": 1, "messages": messages}]),
        "b.parquet": write_parquet([{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]),
        "a.json": json.dumps([{"instruction": "q", "input": "", "output": "a"}]).encode(),
    }
    for name, content in files.items():
        assert tokenize(write_file(tmp_path / name, content, None), chat=True) == expected


BAD_FILES: list[tuple[str, bytes, str]] = [
    ("a.csv", b"id,text\n1,a\n2\n", r"a\.csv row 2: has another number of fields than the first row"),
    ("a.csv", b'id,text\n1,"a\n', r"a\.csv line \d: is not a table: unexpected end of data"),
    ("a.csv", b"id,body\n1,a\n", r"a\.csv: has no column text"),
    ("a.csv", b"id,text\n1,\xff\n", r"is not a table: 'utf-8' codec can't decode"),
    ("a.json", b'[{"text": "a"}, 3]', r"a\.json element 2: is not a JSON object"),
    ("a.json", b'[{"text": "a"}', r"a\.json: is not a JSON array: "),
    ("a.json", b'{\n"text": "a"\n}', r"a\.json line 1: is not JSON"),
    ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: cannot be decompressed"),
    ("a.jsonl.xz", b"", "files of this format are not read"),
    ("a.zip", b"", "files of this format are not read"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_an_unreadable_file_is_an_error_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    for workers in (1, 2):
        with pytest.raises(TrainingError, match=message):
            tokenize(str(tmp_path / name), workers=workers)


def test_a_compressed_file_is_cut_off_or_has_a_bad_line(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
    path = Path(write_file(tmp_path / "a.jsonl.zst", lines, "zstd"))
    assert len(tokenize(str(path))) == 5000
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrainingError, match="cannot be decompressed"):
        tokenize(str(path))
    with pytest.raises(TrainingError, match=r"b\.jsonl\.gz line 3: is not JSON"):
        tokenize(write_file(tmp_path / "b.jsonl.gz", b'{"text": "a"}\n\n{\n', "gzip"))
