"""`swarmtrain data verify` and `inspect`: corruption is found wherever it is, and samples are shown as they are loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import swarmtrain.trainer
from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import open_data
from swarmtrain.trainer.tokenize import command, pipeline
from swarmtrain.trainer.tokenize.sample_inspection import describe_samples
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions
from swarmtrain.trainer.tokenize.verification import verify_token_files


def tokenize_texts(folder: Path, texts: list[str]) -> Path:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    pipeline.tokenize_source_files(TokenizeOptions(f"{folder}/t", "bytes", workers=1), [f"{folder}/a.jsonl"])
    return folder / "t"


@pytest.mark.test_all_only("starts a command for each of several broken files")
@given(ending=some.sampled_from(["bin", "idx"]), at=some.floats(0, 1, exclude_max=True), bit=some.integers(0, 7))
@settings(max_examples=25, deadline=None)
def test_one_bit_is_found(tmp_path_factory: pytest.TempPathFactory, ending: str, at: float, bit: int) -> None:
    prefix = tokenize_texts(tmp_path_factory.mktemp("bit"), ["some text", "more of it", "x"])
    assert str(verify_token_files(prefix)) == (
        f"{prefix}: memory_map, 3 documents, 20 tokens of uint8, from 32 to 120; hashes of t.bin t.idx as recorded"
    )
    path = prefix.with_suffix(f".{ending}")
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(TrainingError) as error:
        verify_token_files(prefix)
    assert error.value.hint


def test_files_without_hashes_are_read_all_the_same(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(6), np.arange(0), np.arange(6)], "int16")
    assert str(verify_token_files(tmp_path / "a")).endswith(
        "a: memory_map, 3 documents, 12 tokens of int16, from 0 to 5; 1 documents are empty; no hashes are recorded"
    )
    memory_map.write_token_files(tmp_path / "a", [np.array([5, -3])], "int16")
    with pytest.raises(TrainingError, match="has token -3"):
        verify_token_files(tmp_path / "a")
    memory_map.write_token_files(tmp_path / "a", [np.array([5, 9])], "int16", {"prepared": {"tokenizer": {"name": "x", "vocab_size": 9}}})
    with pytest.raises(TrainingError, match="has token 9, but tokens must be at least 0 and less than 9"):
        verify_token_files(tmp_path / "a")


def test_all_prefixes_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(6)], "uint8")
    options = json.dumps({"format": "auto", "document_token": None, "json": False})
    assert command.main(["verify", options, f"{tmp_path}/none", f"{tmp_path}/a"]) == 1
    said = capsys.readouterr()
    assert "none.meta.json: no such file" in said.err
    assert "a: memory_map, 1 documents" in said.out
    assert command.main(["verify", options.replace("false", "true"), f"{tmp_path}/a"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 6
    assert command.main(["verify", json.dumps({"format": "own", "document_token": None}), "a"]) == 1
    assert "'own' is not one of auto, memory_map, megatron" in capsys.readouterr().err


RUN_PATTERN = re.compile(r"  (loss   |no loss) tokens (\d+)-(\d+), positions (\d+)-(\d+), document (\d+)( begins)?: (.*)")


@pytest.mark.test_all_only("starts a command for each of several broken files")
@given(
    lengths=some.lists(some.integers(1, 12), min_size=2, max_size=8),
    packing=some.sampled_from(["stream", "documents"]),
    reset=some.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_what_is_shown_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], packing: str, *, reset: bool
) -> None:
    """The shown samples are read back token by token."""
    prefix = tokenize_texts(
        tmp_path_factory.mktemp("look"),
        ["".join(chr(97 + (number + at) % 26) for at in range(size)) for number, size in enumerate([*lengths, 5])],
    )
    shape = {"sequence_length": 6, "vocab_size": 256, "reset_position_ids": reset}
    config = Config.from_json(json.dumps({"transformer_architecture": shape, "data": {"data_prefixes": [str(prefix)], "packing": packing}}))
    data, _ = open_data(config)
    rows = data.load_samples(data.build_batch(0, len(data)).ids)
    for row, sample in enumerate(describe_samples(config, len(data))):
        inputs, targets, positions = np.zeros(6, dtype=int), np.full(6, -1), np.full(6, -1)
        for line in str(sample).splitlines()[1:]:
            match = RUN_PATTERN.fullmatch(line)
            assert match, line
            first, end, position = int(match[2]), int(match[3]), int(match[4])
            tokens = list(json.loads(match[8]).encode())
            assert len(tokens) == end - first + 1 == int(match[5]) - position + 1
            for column, token in enumerate(tokens, first):
                if match[1] == "loss   ":
                    targets[column - 1] = token
                if column < 6:
                    inputs[column], positions[column] = token, position + column - first
        counted = rows.targets[row].numpy() >= 0
        assert targets.tolist() == rows.targets[row].tolist()
        assert inputs[counted].tolist() == rows.inputs[row].numpy()[counted].tolist()
        if rows.document_ids is not None:
            numbers = rows.document_ids[row].numpy()
            expected = np.arange(6) - np.searchsorted(numbers, numbers)
            assert positions[counted].tolist() == expected[counted].tolist()


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tokenize_texts(tmp_path, ["Wide is the gate"])
    config: dict[str, Any] = {
        "transformer_architecture": {"sequence_length": 8, "vocab_size": 256},
        "data": {"data_prefixes": [str(prefix)]},
    }
    options = {"config": Config.from_json(json.dumps(config)).to_json(), "samples": 1, "tokenizer": None, "json": False}
    assert command.main(["inspect", json.dumps(options)]) == 0
    shown = capsys.readouterr().out
    assert f"sample id 1, in {prefix}; " in shown
    assert any(f': "{text}"' in shown for text in ("ide is t", "he gate"))
    assert command.main(["inspect", json.dumps({**options, "json": True})]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert [span["text"] for span in sample["token_spans"]][-1].endswith(("is t", "gate"))
    assert bytes(sample["token_spans"][0]["tokens"]).decode() == sample["token_spans"][0]["text"]


def test_text_is_tokenized_without_torch() -> None:
    """torch takes seconds to import, and gigabytes to install. The trainer's public names are available all the same."""
    found = "import sys, swarmtrain.trainer as trainer, swarmtrain.trainer.tokenize.command\nassert 'torch' not in sys.modules\n"
    every = "[getattr(trainer, name) for name in reversed(trainer.__all__)]\nfrom swarmtrain.trainer import start_runtime, train_model"
    subprocess.run([sys.executable, "-c", found + every], check=True, timeout=120)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = swarmtrain.trainer.nothing
