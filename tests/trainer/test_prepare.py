"""`swarmtrain data prepare`: the same bytes however many make them and however often it is killed; nothing is left out in silence."""

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
import prepared
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as some
from prepared import ENDINGS, SPECIAL, contents, lines, read

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import DataError, TrainingError
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.prepare import encoders, job, shards, sources
from swarmtrain.trainer.prepare.options import Options
from swarmtrain.trainer.prepare.shapes import Texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    prepared.tokenizer(path)
    return path


def slowly(tokenizer: Path, texts: Sequence[str], end: Sequence[int]) -> list[list[int]]:
    """One text at a time, by the library alone."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return [[*library.encode(text, add_special_tokens=False).ids, *end] for text in texts if text]


texts_of = some.lists(
    some.text(some.characters(exclude_categories=["Cs"]), max_size=30) | some.sampled_from(SPECIAL), min_size=1, max_size=30
)


@given(texts=texts_of, size=some.integers(1, 400), escaped=some.booleans(), end=some.booleans(), blank=some.booleans())
@settings(max_examples=20, deadline=None)
def test_any_lines(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, texts: list[str], size: int, *, escaped: bool, end: bool, blank: bool
) -> None:
    """By comparison with one line after the other, whatever the size of shards and the number of workers."""
    folder = tmp_path_factory.mktemp("lines")
    gap = "\n \r\n" if blank else "\n"
    written = gap.join(json.dumps({"n": 1, "text": text}, ensure_ascii=escaped) for text in ["x", *texts])
    (folder / "a.jsonl").write_text(written, newline="")
    asked = Options(str(folder / "one"), str(tokenizer), append_eos=end)
    job.prepare(replace(asked, workers=1), [str(folder / "a.jsonl")])
    job.prepare(replace(asked, prefix=str(folder / "many"), workers=3), [str(folder / "a.jsonl")], shard=size)
    assert read(folder / "one") == slowly(tokenizer, ["x", *texts], [0] if end else [])
    assert contents(folder / "one") == contents(folder / "many")
    assert json.loads(contents(folder / "one")[-1])["skipped"] == {"bad": 0, "empty": texts.count("")}
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.jsonl",
        *(f"{name}.{ending}" for name in ("many", "one") for ending in ENDINGS),
    ]


def test_parquet_and_texts_and_lines_are_one_set(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"n": range(50), "body": rows}), tmp_path / "b.parquet", row_group_size=7)
    lines(tmp_path / "c.jsonl", [{"body": "a line"}, {"body": "é"}])
    for name in ("e.txt", "d.md"):
        (tmp_path / name).write_text(f"file {name}\n")
    names = [str(tmp_path / "b.parquet"), str(tmp_path / "c.jsonl"), str(tmp_path / "[de].*")]
    for number, size in enumerate((1, 60, 1 << 20)):
        prefix = tmp_path / str(number)
        meta = job.prepare(Options(str(prefix), "bytes", key="body", workers=2, append_eos=True), names, shard=size)
        texts = [*rows, "a line", "é", "file d.md\n", "file e.txt\n"]
        assert read(prefix) == [[*text.encode(), 256] for text in texts]
        assert [Path(each["name"]).name for each in meta["prepared"]["sources"]] == ["b.parquet", "c.jsonl", "d.md", "e.txt"]
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def _prepare(asked: Options, names: Sequence[str], log: Path, size: int) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w")
    job.prepare(asked, names, shard=size)


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended; init may collect it later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_killed_again_and_again(tmp_path: Path, tokenizer: Path) -> None:
    """What comes out is what comes out at once; workers end with the one that started them, and what was done is not done again."""
    chosen = random.Random(4)  # noqa: S311  # when to kill
    words = Path(__file__).read_text().split()
    name = lines(tmp_path / "a.jsonl", [{"text": " ".join(chosen.choices(words, k=60))} for _ in range(4000)])
    asked = Options(str(tmp_path / "killed"), str(tokenizer), workers=2)
    made: list[int] = []

    def shards() -> int:
        return len(list((tmp_path / "killed.parts").glob("[0-9]*.json")))

    while True:
        worker = multiprocessing.get_context("fork").Process(target=_prepare, args=(asked, [name], tmp_path / "log", 30_000))
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
        while any(map(_runs, children)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if not (tmp_path / "killed.meta.json").exists():  # whole already: what it was made of is being removed
            made.append(shards())
    assert worker.exitcode == 0
    assert len(made) > 4
    assert made == sorted(made)
    assert "goes on: " in (tmp_path / "log").read_text()
    job.prepare(replace(asked, prefix=str(tmp_path / "once"), workers=1), [name])
    assert contents(tmp_path / "killed") == contents(tmp_path / "once")
    assert not (tmp_path / "killed.parts").exists()


def test_other_input_or_options_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = lines(tmp_path / "a.jsonl", [*({"text": str(number), "other": "x"} for number in range(50)), {"no": 1}])
    asked = Options(str(tmp_path / "t"), "bytes", workers=1)
    with pytest.raises(TrainingError, match="line 51"):
        job.prepare(asked, [name], shard=100)
    lines(tmp_path / "a.jsonl", [{"text": str(number), "other": "x"} for number in range(1, 52)])
    with pytest.raises(TrainingError, match="line 1: has no 'gone'"):
        job.prepare(replace(asked, key="gone"), [name], shard=100)
    assert "begins anew: not the same options and sources as in what was begun" in capsys.readouterr().err
    job.prepare(asked, [name], shard=100)
    assert "begins anew: not the same options as" in capsys.readouterr().err
    assert read(tmp_path / "t") == [list(str(number).encode()) for number in range(1, 52)]
    job.prepare(replace(asked, key="other"), [name], shard=100)
    assert read(tmp_path / "t") == [[ord("x")]] * 51, "what this wrote, it may replace"
    capsys.readouterr()
    (tmp_path / "a.jsonl").touch()
    job.prepare(replace(asked, key="other"), [name], shard=100)
    assert "is there already" in capsys.readouterr().err, "another time is no other content"


BAD = {
    "{": "is no JSON",
    '{"other": 1}': "has no 'text'; it has 'other'",
    '{"text": null}': "'text' is null, not a text",
    '{"text": 3}': "'text' is int, not a text",
    "[1]": "is no JSON object",
    '{"text": "\\ud800"}': "has half of a character",
}


@pytest.mark.parametrize("line", BAD)
@pytest.mark.parametrize("workers", [1, 3])
def test_bad_lines(tmp_path: Path, line: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps({"text": f"line {number}"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*good[:20], line, "", *good[20:30], "nothing", *good[30:]]))
    asked = Options(str(tmp_path / "t"), "bytes", workers=workers)
    with pytest.raises(TrainingError, match=r"a\.jsonl line 21: ") as error:
        job.prepare(asked, [str(tmp_path / "a.jsonl")], shard=64)
    assert BAD[line] in error.value.message
    assert "--on-bad skip" in (error.value.hint or "")
    capsys.readouterr()
    for on_bad in ("skip", "count"):
        meta = job.prepare(replace(asked, on_bad=on_bad, prefix=f"{tmp_path}/{on_bad}"), [str(tmp_path / "a.jsonl")], shard=64)
        said = capsys.readouterr().err
        assert ("a.jsonl line 21: " in said) == ("a.jsonl line 33: is no JSON" in said) == (on_bad == "skip")
        assert "2 records were skipped, since they could not be read" in said
        assert (meta["document_count"], meta["skipped"]["bad"]) == (40, 2)


def test_stops_at_what_an_earlier_go_skipped(tmp_path: Path) -> None:
    """`stop` after `skip` has been interrupted: shards with bad records are there, and are no reason to pass over them."""
    name = lines(tmp_path / "a.jsonl", [{"text": "a"}, {}, *[{"text": "b"}] * 9])
    asked = Options(str(tmp_path / "t"), "bytes", workers=1)
    shaper, files = Texts(encoders.opened("bytes"), "text", None), sources.found([name])
    with pytest.raises(TrainingError, match="line 2"):
        job.prepare(asked, [name], shard=20)
    plan = sources.shards(files, ["text"], 20)
    shards.make(tmp_path / "t.parts", 0, plan[0], files, shaper, stop=False)
    with pytest.raises(TrainingError, match="line 2"):
        job.prepare(asked, [name], shard=20)


def test_what_cannot_be_prepared_is_said(tmp_path: Path, tokenizer: Path) -> None:
    name = lines(tmp_path / "a.jsonl", [{"text": ""}])
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not PAR1")
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "own.bin").write_bytes(b"1")
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        (f"{tmp_path}/none*", "no such file", {}),
        (f"{tmp_path}/a.jsonl.gz", "is packed", {}),
        (f"{tmp_path}/a.parquet", "has no column text", {}),
        (f"{tmp_path}/b.parquet", "is no Parquet file", {}),
        (f"{tmp_path}/bad.txt", "bad.txt: is no UTF-8: invalid start byte at byte 1", {}),
        (name, "there is not one document", {}),
        (name, "were not prepared by this", {"prefix": f"{tmp_path}/own"}),
        (name, "no such file", {"tokenizer": f"{tmp_path}/none.json"}),
        (name, "is no tokenizer.json", {"tokenizer": name}),
        (name, "has no token '<no>'", {"tokenizer": str(tokenizer), "end_token": "<no>"}),
    ]
    for file, said, changes in wrong:
        with pytest.raises(TrainingError, match=said):
            job.prepare(replace(Options(f"{tmp_path}/t", "bytes", workers=1), **changes), [file])
    with pytest.raises(TrainingError, match="is named twice"):
        job.prepare(Options(f"{tmp_path}/t", "bytes", workers=1), [name, name])


def test_the_end_is_the_tokenizer_s_own(tmp_path: Path, tokenizer: Path) -> None:
    """As the file beside it says; special tokens in a text are text."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    name = lines(tmp_path / "a.jsonl", [{"text": "<|im_end|> a <|endoftext|>"}])
    job.prepare(Options(f"{tmp_path}/t", f"{tmp_path}/tokenizer.json", append_eos=True, workers=1), [name])
    (document,) = read(tmp_path / "t")
    assert document[-1] == 1
    assert not {0, 1} & set(document[:-1])
    assert encoders.opened(str(tokenizer)).decode(document) == "<|im_end|> a <|endoftext|><|im_end|>"


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """Before a token that it has no row for is met, or even there."""
    meta = job.prepare(Options(f"{tmp_path}/t", str(tokenizer), workers=1), [lines(tmp_path / "a.jsonl", [{"text": "a b c"}])])
    size = meta["prepared"]["tokenizer"]["vocab_size"]
    assert Samples([tmp_path / "t"], TransformerArchitectureConfig(sequence_length=2, vocab_size=size), 0)
    with pytest.raises(DataError, match=rf"is {size - 1}, and .*tokenizer.json, which made the tokens of .*, has {size}"):
        Samples([tmp_path / "t"], TransformerArchitectureConfig(sequence_length=2, vocab_size=size - 1), 0)


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for number in (4_000, 32_000):
        name = lines(tmp_path / f"{number}.jsonl", [{"text": "x" * 500}] * number)
        files = sources.found([name])
        tracemalloc.start()
        plan = sources.shards(files, ["text"], 1 << 30)
        facts = shards.make(tmp_path, 0, plan[0], files, Texts(encoders.opened("bytes"), "text", None), stop=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert facts.tokens == 500 * number
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.test_all_only("kills and repeats the tokenizer's processes, or measures their memory")
def test_ctrl_c_and_again(tmp_path: Path) -> None:
    """On the command line: what is done stays, no process does, and the same command goes on."""
    name = lines(tmp_path / "a.jsonl", [{"text": "some words " * 400}] * 16_000)
    command = [
        sys.executable,
        "-m",
        "swarmtrain",
        "data",
        "prepare",
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
    assert "interrupted: what is done stays; the same command goes on from here" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(begun.pid, 0)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert "goes on: " in again.stderr
    assert again.stdout == "t: 16,000 documents, 70,416,000 tokens, 140.8 MB\n".replace("70,416,000", f"{16000 * 4401:,}")
    assert np.fromfile(tmp_path / "t.bin", dtype=np.uint16).reshape(-1, 4401)[:, -1].tolist() == [256] * 16_000
