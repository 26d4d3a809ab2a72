"""`swarmtrain data tokenize`: the same bytes for any number of workers and after any number of kills; nothing is skipped silently."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import tokenize_helpers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenize_helpers import ENDINGS, SPECIAL_TOKENS, read_contents, read_documents, write_lines

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import DataError, TrainingError
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.tokenize import pipeline, readers, shards, tokenizer_backends
from swarmtrain.trainer.tokenize.document_builders import TextBuilder
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenize_helpers.write_tokenizer(path)
    return path


def tokenize_by_hand(tokenizer: Path, texts: Sequence[str], end: Sequence[int]) -> list[list[int]]:
    """Return the tokens of one text at a time, by transformers; a token that a text begins or ends with is not added again."""
    reference = transformers.AutoTokenizer.from_pretrained(tokenizer.parent)
    documents = []
    for text in filter(None, texts):
        added, plain = reference(text).input_ids, reference(text, add_special_tokens=False).input_ids
        assert added == [0, *plain]
        tokens = plain if plain[0] == 0 else added
        documents.append(tokens if tokens[-1:] == end else [*tokens, *end])
    return documents


text_lists = some.lists(
    some.text(some.characters(exclude_categories=["Cs"]), max_size=30) | some.sampled_from(SPECIAL_TOKENS), min_size=1, max_size=30
)


@given(texts=text_lists, size=some.integers(1, 400), escaped=some.booleans(), end=some.booleans(), blank=some.booleans())
@settings(max_examples=20, deadline=None)
def test_any_lines(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, texts: list[str], size: int, *, escaped: bool, end: bool, blank: bool
) -> None:
    """Compared with one line after the other, for any size of shards and number of workers."""
    folder = tmp_path_factory.mktemp("lines")
    gap = "\n \r\n" if blank else "\n"
    written = gap.join(json.dumps({"n": 1, "text": text}, ensure_ascii=escaped) for text in ["x", *texts])
    (folder / "a.jsonl").write_text(written, newline="")
    asked = TokenizeOptions(str(folder / "one"), str(tokenizer), append_eos=end)
    pipeline.tokenize_source_files(replace(asked, workers=1), [str(folder / "a.jsonl")])
    pipeline.tokenize_source_files(replace(asked, prefix=str(folder / "many"), workers=3), [str(folder / "a.jsonl")], min_shard_bytes=size)
    assert read_documents(folder / "one") == tokenize_by_hand(tokenizer, ["x", *texts], [0] if end else [])
    assert read_contents(folder / "one") == read_contents(folder / "many")
    assert json.loads(read_contents(folder / "one")[-1])["skipped"] == {"bad": 0, "empty": texts.count("")}
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.jsonl",
        *(f"{name}.{ending}" for name in ("many", "one") for ending in ENDINGS),
    ]


def test_parquet_and_texts_and_lines_are_one_set(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"n": range(50), "body": rows}), tmp_path / "b.parquet", row_group_size=7)
    write_lines(tmp_path / "c.jsonl", [{"body": "a line"}, {"body": "é"}])
    for name in ("e.txt", "d.md"):
        (tmp_path / name).write_text(f"file {name}\n")
    names = [str(tmp_path / "b.parquet"), str(tmp_path / "c.jsonl"), str(tmp_path / "[de].*")]
    for number, size in enumerate((1, 60, 1 << 20)):
        prefix = tmp_path / str(number)
        meta = pipeline.tokenize_source_files(
            TokenizeOptions(str(prefix), "bytes", key="body", workers=2, append_eos=True), names, min_shard_bytes=size
        )
        texts = [*rows, "a line", "é", "file d.md\n", "file e.txt\n"]
        assert read_documents(prefix) == [[*text.encode(), 256] for text in texts]
        assert [Path(each["name"]).name for each in meta["prepared"]["sources"]] == ["b.parquet", "c.jsonl", "d.md", "e.txt"]
    assert read_contents(tmp_path / "0") == read_contents(tmp_path / "2")


def _run_prepare(options: TokenizeOptions, names: Sequence[str], log: Path, size: int) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w")
    pipeline.tokenize_source_files(options, names, min_shard_bytes=size)


def _is_running(process: psutil.Process) -> bool:
    """Return whether the process has not ended; init may reap it later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_killed_again_and_again(tmp_path: Path, tokenizer: Path) -> None:
    """The output equals that of one uninterrupted run; workers end with their parent, and finished shards are not redone."""
    chosen = random.Random(4)  # noqa: S311  # when to kill
    words = Path(__file__).read_text().split()
    name = write_lines(tmp_path / "a.jsonl", [{"text": " ".join(chosen.choices(words, k=60))} for _ in range(4000)])
    asked = TokenizeOptions(str(tmp_path / "killed"), str(tokenizer), workers=2)
    made: list[int] = []

    def shards() -> int:
        return len(list((tmp_path / "killed.parts").glob("[0-9]*.json")))

    while True:
        worker = multiprocessing.get_context("fork").Process(target=_run_prepare, args=(asked, [name], tmp_path / "log", 30_000))
        worker.start()
        further = max(made, default=0) + chosen.randint(1, 12) if len(made) > 2 else 0
        while worker.is_alive() and shards() < further:
            time.sleep(0.001)
        worker.join(chosen.uniform(0, 0.02))
        if worker.exitcode is not None:
            break
        children = psutil.Process(worker.pid).children()
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        deadline = time.monotonic() + 30
        while any(map(_is_running, children)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if not (tmp_path / "killed.meta.json").exists():  # complete already: its shards are being removed
            made.append(shards())
    assert worker.exitcode == 0
    assert len(made) > 4
    assert made == sorted(made)
    assert "resuming: " in (tmp_path / "log").read_text()
    pipeline.tokenize_source_files(replace(asked, prefix=str(tmp_path / "once"), workers=1), [name])
    assert read_contents(tmp_path / "killed") == read_contents(tmp_path / "once")
    assert not (tmp_path / "killed.parts").exists()


def test_other_input_or_options_start_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write_lines(tmp_path / "a.jsonl", [*({"text": str(number), "other": "x"} for number in range(50)), {"no": 1}])
    asked = TokenizeOptions(str(tmp_path / "t"), "bytes", workers=1)
    with pytest.raises(TrainingError, match="line 51"):
        pipeline.tokenize_source_files(asked, [name], min_shard_bytes=100)
    write_lines(tmp_path / "a.jsonl", [{"text": str(number), "other": "x"} for number in range(1, 52)])
    with pytest.raises(TrainingError, match="line 1: has no key 'gone'"):
        pipeline.tokenize_source_files(replace(asked, key="gone"), [name], min_shard_bytes=100)
    assert "starting from scratch: not the same options and sources as in the interrupted job" in capsys.readouterr().err
    pipeline.tokenize_source_files(asked, [name], min_shard_bytes=100)
    assert "starting from scratch: not the same options as" in capsys.readouterr().err
    assert read_documents(tmp_path / "t") == [list(str(number).encode()) for number in range(1, 52)]
    pipeline.tokenize_source_files(replace(asked, key="other"), [name], min_shard_bytes=100)
    assert read_documents(tmp_path / "t") == [[ord("x")]] * 51, "what this wrote, it may replace"
    capsys.readouterr()
    (tmp_path / "a.jsonl").touch()
    pipeline.tokenize_source_files(replace(asked, key="other"), [name], min_shard_bytes=100)
    assert "already exists" in capsys.readouterr().err, "another time is no other content"


INVALID_LINES = {
    "{": "is not JSON",
    '{"other": 1}': "has no key 'text'; its keys: 'other'",
    '{"text": null}': "'text' is null, not a string",
    '{"text": 3}': "'text' is int, not a string",
    "[1]": "is not a JSON object",
    '{"text": "\\ud800"}': "contains a lone surrogate",
}


@pytest.mark.parametrize("line", INVALID_LINES)
@pytest.mark.parametrize("workers", [1, 3])
def test_bad_lines(tmp_path: Path, line: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps({"text": f"line {number}"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*good[:20], line, "", *good[20:30], "nothing", *good[30:]]))
    asked = TokenizeOptions(str(tmp_path / "t"), "bytes", workers=workers)
    with pytest.raises(TrainingError, match=r"a\.jsonl line 21: ") as error:
        pipeline.tokenize_source_files(asked, [str(tmp_path / "a.jsonl")], min_shard_bytes=64)
    assert INVALID_LINES[line] in error.value.message
    assert "--on-bad skip" in (error.value.hint or "")
    capsys.readouterr()
    for on_bad in ("skip", "count"):
        meta = pipeline.tokenize_source_files(
            replace(asked, on_bad=on_bad, prefix=f"{tmp_path}/{on_bad}"), [str(tmp_path / "a.jsonl")], min_shard_bytes=64
        )
        said = capsys.readouterr().err
        assert ("a.jsonl line 21: " in said) == ("a.jsonl line 33: is not JSON" in said) == (on_bad == "skip")
        assert "2 records were skipped, since they could not be read" in said
        assert (meta["document_count"], meta["skipped"]["bad"]) == (40, 2)


def test_stops_at_what_an_earlier_go_skipped(tmp_path: Path) -> None:
    """`stop` after an interrupted `skip`: the bad records that existing shards skipped still stop it."""
    name = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {}, *[{"text": "b"}] * 9])
    asked = TokenizeOptions(str(tmp_path / "t"), "bytes", workers=1)
    shaper, files = TextBuilder(tokenizer_backends.open_tokenizer("bytes"), "text"), readers.find_source_files([name])
    with pytest.raises(TrainingError, match="line 2"):
        pipeline.tokenize_source_files(asked, [name], min_shard_bytes=20)
    plan = readers.plan_shards(files, ["text"], 20)
    shards.build_shard(tmp_path / "t.parts", 0, plan[0], files, shaper, stop_on_invalid_record=False)
    with pytest.raises(TrainingError, match="line 2"):
        pipeline.tokenize_source_files(asked, [name], min_shard_bytes=20)


def test_what_cannot_be_tokenized_is_reported(tmp_path: Path, tokenizer: Path) -> None:
    name = write_lines(tmp_path / "a.jsonl", [{"text": ""}])
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not PAR1")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "own.bin").write_bytes(b"1")
    (tmp_path / "note.txt").write_text("p,c\n")
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        (f"{tmp_path}/none*", "no such file", {}),
        (f"{tmp_path}/note.txt", r"note\.txt: is one text, without the fields 'p' and 'c'", {"prompt_key": "p", "completion_key": "c"}),
        (f"{tmp_path}/a.parquet", "has no column text", {}),
        (f"{tmp_path}/b.parquet", "is not a Parquet file", {}),
        (f"{tmp_path}/bad.txt", "bad.txt: is not UTF-8: invalid start byte at byte 1", {}),
        (name, "the source files contain no documents", {}),
        (name, "swarmtrain data tokenize did not write", {"prefix": f"{tmp_path}/own"}),
        (name, "no such file", {"tokenizer": f"{tmp_path}/none.json"}),
        (name, "cannot be loaded by transformers", {"tokenizer": name}),
        (name, "has no token '<no>'", {"tokenizer": str(tokenizer), "eos_token": "<no>"}),
    ]
    for file, said, changes in wrong:
        with pytest.raises(TrainingError, match=said):
            pipeline.tokenize_source_files(replace(TokenizeOptions(f"{tmp_path}/t", "bytes", workers=1), **changes), [file])
    with pytest.raises(TrainingError, match="is listed twice"):
        pipeline.tokenize_source_files(TokenizeOptions(f"{tmp_path}/t", "bytes", workers=1), [name, name])


def test_the_end_is_the_tokenizer_s_own(tmp_path: Path, tokenizer: Path) -> None:
    """As tokenizer_config.json defines it; special tokens in a text are these tokens, or with an option, text."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    text = "<|im_end|> a <|endoftext|>"
    name = write_lines(tmp_path / "a.jsonl", [{"text": text}])
    plain = TokenizeOptions(f"{tmp_path}/t", str(tmp_path), append_eos=True, workers=1)
    for options, special in ((plain, {0, 1}), (replace(plain, split_special_tokens=True, special_tokens=False), set[int]())):
        pipeline.tokenize_source_files(options, [name])
        (document,) = read_documents(tmp_path / "t")
        meta = json.loads((tmp_path / "t.meta.json").read_text())
        assert (document[-1], meta["stop_tokens"]) == (1, [1])
        begin = meta["begin_tokens"]
        assert begin == ([0] if options.special_tokens else [])
        assert document[: len(begin)] == begin
        assert {0, 1} & set(document[len(begin) : -1]) == special
        assert tokenizer_backends.open_tokenizer(str(tokenizer)).decode(document[len(begin) :]) == f"{text}<|im_end|>"


def test_a_byte_order_mark_is_not_a_token(tmp_path: Path) -> None:
    for name, content in (("a.txt", "text"), ("a.jsonl", '{"text": "text"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        pipeline.tokenize_source_files(TokenizeOptions(f"{tmp_path}/{name}.t", "bytes", workers=1), [f"{tmp_path}/{name}"])
        assert read_documents(tmp_path / f"{name}.t") == [list(b"text")]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """Before a token without an embedding row is read, and even if there is none."""
    meta = pipeline.tokenize_source_files(
        TokenizeOptions(f"{tmp_path}/t", str(tokenizer), workers=1), [write_lines(tmp_path / "a.jsonl", [{"text": "a b c"}])]
    )
    size = meta["prepared"]["tokenizer"]["vocab_size"]
    assert TokenDataset([tmp_path / "t"], TransformerArchitectureConfig(sequence_length=2, vocab_size=size), 0)
    with pytest.raises(DataError, match=rf"is {size - 1}, but .*tokenizer.json, the tokenizer of .*, has {size}"):
        TokenDataset([tmp_path / "t"], TransformerArchitectureConfig(sequence_length=2, vocab_size=size - 1), 0)


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for number in (4_000, 32_000):
        name = write_lines(tmp_path / f"{number}.jsonl", [{"text": "x" * 500}] * number)
        files = readers.find_source_files([name])
        tracemalloc.start()
        plan = readers.plan_shards(files, ["text"], 1 << 30)
        stats = shards.build_shard(
            tmp_path, 0, plan[0], files, TextBuilder(tokenizer_backends.open_tokenizer("bytes"), "text"), stop_on_invalid_record=True
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert stats.tokens == 500 * number
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_ctrl_c_and_again(tmp_path: Path) -> None:
    """On the command line: finished shards stay, no process does, and the same command resumes."""
    name = write_lines(tmp_path / "a.jsonl", [{"text": "some words " * 400}] * 16_000)
    command = [
        sys.executable,
        "-m",
        "swarmtrain",
        "data",
        "tokenize",
        name,
        "--to",
        "t",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
        "--append-eos",
    ]
    begun = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "t.parts" / "000000.json").exists():
        assert begun.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(begun.pid, signal.SIGINT)
    _, said = begun.communicate(timeout=20)
    assert begun.returncode == 130, said
    assert "interrupted: finished shards are kept; run the same command again to resume" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(begun.pid, 0)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert "resuming: " in again.stderr
    assert again.stdout == "t: 16,000 documents, 70,416,000 tokens, 140.8 MB\n".replace("70,416,000", f"{16000 * 4401:,}")
    assert np.fromfile(tmp_path / "t.bin", dtype=np.uint16).reshape(-1, 4401)[:, -1].tolist() == [256] * 16_000
