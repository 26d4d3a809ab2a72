"""Text into tokens, beside the tokenizer alone; and what memory that, and the export of a large model, take."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import BUILD, SWARMTRAIN, Row, Sample, in_turns, peak_memory, say, wall_seconds

_RUNS = 3
_FOLDER = BUILD / "models"
_VOCABULARY = 16_384
_LEARNED_FROM = 20_000_000
_MEGABYTES = 1000
"""Of text."""
_SHARD = 2 * 10**9
_FLAT = 1.2
"""What memory may be, in terms of what it is compared with."""
_ALONE = """
import json, sys
from itertools import islice
from tokenizers import Tokenizer

tokenizer, count = Tokenizer.from_file(sys.argv[1]), 0
with open(sys.argv[2]) as lines:
    while batch := [json.loads(line)["text"] for line in islice(lines, 1000)]:
        count += sum(len(each.ids) for each in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
print(count)
"""


def prepared() -> Iterator[Row]:
    """`data prepare` of real text, repeated with edits, beside a script that does nothing but encode it; and how memory grows."""
    whole, tenth = _text(_FOLDER / "whole.jsonl", _MEGABYTES), _text(_FOLDER / "tenth.jsonl", _MEGABYTES // 10)
    tokenizer = _tokenizer(tenth)
    workers = len(os.sched_getaffinity(0))
    alone = partial(_alone, [sys.executable, "-c", _ALONE, str(tokenizer), str(whole)], {"RAYON_NUM_THREADS": str(workers)})
    ours, other = in_turns(_RUNS, partial(_prepared, whole, tokenizer), alone, warm_up=False)
    what = f"`swarmtrain data prepare` of {_MEGABYTES} MB of text, a BPE of {_VOCABULARY:,} tokens, {workers} processes"
    ours, other = (Sample.of([_MEGABYTES / seconds for seconds in each.values]) for each in (ours, other))
    yield Row("prepare", what, "MB/s", ours, other, f"`tokenizers` alone, {workers} threads: lines read, encoded, counted", goal=0.9)
    peaks = [_peak(each, tokenizer) for each in (whole, tenth)]
    yield Row(
        "prepare/memory",
        f"peak memory of a process of it, {_MEGABYTES} MB of text",
        "MB",
        Sample.of([peaks[0]]),
        Sample.of([peaks[1]]),
        "a tenth of the text",
        limit=_FLAT * peaks[1],
    )
    shutil.rmtree(_FOLDER)


def exported() -> Iterator[Row]:
    """What memory `export` takes for a model of 1.2 billion parameters, in files of at most 2 GB."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    say("writing a checkpoint of 1.2 billion parameters")
    config = _FOLDER / "config.yml"
    argv = [*SWARMTRAIN, "init", str(config), "--preset", "llama-3.2-1b"]
    wall_seconds(argv)
    values = {
        # Nothing is trained, and there is no optimizer's state of what would not be.
        "trainer.train_iterations": 0,
        "trainer.finetunable_parameters": "[norm]",
        "trainer.save_dir": str(_FOLDER / "run"),
        "data.data_prefixes": f"[{_FOLDER / 'tokens'}]",
        "transformer_architecture.sequence_length": 128,
        "topology.global_batch_size": 1,
        "topology.micro_batch_size": 1,
    }
    (_FOLDER / "text.jsonl").write_text(json.dumps({"text": "a " * 1000}) + "\n")
    wall_seconds([*SWARMTRAIN, "data", "prepare", str(_FOLDER / "text.jsonl"), "--to", str(_FOLDER / "tokens"), "--tokenizer", "bytes"])
    wall_seconds([sys.executable, "training_code.py", str(config), *(f"{key}={value}" for key, value in values.items())])
    question = json.dumps(
        {
            "source": str(_FOLDER / "run"),
            "base": None,
            "output": str(_FOLDER / "out"),
            "dtype": None,
            "shard_bytes": _SHARD,
            "adapter": False,
            "tokenizer": None,
            "json": False,
        }
    )
    peak = peak_memory([sys.executable, "-m", "swarmtrain.trainer", "export"], input=question) / 1e9
    largest = max(path.stat().st_size for path in (_FOLDER / "out").glob("*.safetensors")) / 1e9
    what = "peak memory of `swarmtrain export` of 1.2 billion parameters in float32"
    yield Row("export", what, "GB", Sample.of([peak]), Sample.of([largest]), "the largest of its files", limit=_FLAT * largest)
    shutil.rmtree(_FOLDER)


def _text(path: Path, megabytes: int) -> Path:
    """Write so much text as JSONL: the source of the standard library over and over, each time with other words exchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [text for each in sources if "site-packages" not in each.parts if (text := each.read_text(errors="replace"))]
    words, chosen, size = sorted({word for text in texts[:200] for word in text.split()}), random.Random(1), 0  # noqa: S311
    with path.open("w") as file:
        while True:
            old, new = chosen.sample(words, 2)
            for text in texts:
                size += file.write(json.dumps({"text": text.replace(old, new)}) + "\n")
                if size >= megabytes * 10**6:
                    return path


def _tokenizer(text: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    with text.open() as lines:
        made.train_from_iterator((json.loads(line)["text"] for line in lines.readlines(_LEARNED_FROM)), trainer)
    path = _FOLDER / "tokenizer.json"
    made.save(str(path))
    return path


def _command(text: Path, tokenizer: Path) -> list[str]:
    for path in _FOLDER.glob("tokens*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [*SWARMTRAIN, "data", "prepare", str(text), "--to", str(_FOLDER / "tokens"), "--tokenizer", str(tokenizer)]


def _prepared(text: Path, tokenizer: Path) -> float:
    return wall_seconds(_command(text, tokenizer))


def _alone(argv: list[str], env: dict[str, str]) -> float:
    return wall_seconds(argv, env)


def _peak(text: Path, tokenizer: Path) -> float:
    return peak_memory(_command(text, tokenizer)) / 1e6
