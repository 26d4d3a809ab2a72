"""The unit of the loss is that of the data: bytes only if each token is a byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenize_helpers import write_lines, write_tokenizer
from worlds import LocalWorld, merge_config, run_training

import training_code
from swarmtrain.protocol.distributed_env import reserve_port
from swarmtrain.trainer import TrainingResult
from swarmtrain.trainer.tokenize import pipeline
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions


@pytest.mark.parametrize(
    ("tokenizer", "append_eos", "unit"),
    [("bytes", False, "byte"), ("bytes", True, "token"), ("tokenizer.json", False, "token")],
    ids=["bytes", "bytes and EOS", "byte pairs"],
)
def test_training_and_evaluation_print_the_unit_of_the_data(
    tmp_path: Path, config: dict[str, Any], tokenizer: str, *, append_eos: bool, unit: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    path = tokenizer if tokenizer == "bytes" else str(tmp_path / tokenizer)
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "the run is done on each node " * 20}] * 8)
    pipeline.tokenize_source_files(TokenizeOptions(str(tmp_path / "texts"), path, append_eos=append_eos, workers=1), [texts])
    prefixes = [str(tmp_path / "texts")]
    own = merge_config(
        config,
        data={"data_prefixes": prefixes, "validation_data_prefixes": prefixes},
        transformer_architecture={"vocab_size": 512},
        trainer={"train_iterations": 1},
    )
    run_training(tmp_path, own)
    assert f" nats per {unit}\n" in (tmp_path / "rank-0.log").read_text()

    for is_json in (True, False):
        arguments: dict[str, Any] = {"config": json.dumps(own), "model": str(tmp_path / "run"), "tasks": [], "json": is_json}
        with reserve_port() as port:
            (tmp_path / "asked.json").write_text(json.dumps([{"port": port.getsockname()[1], "arguments": arguments}]))
            world = LocalWorld(tmp_path, {}, 1, script="evaluated_batches")
            assert world.wait() == [0], world.read_log()
    *_, report_line, text = (tmp_path / "rank-0.log").read_text().splitlines()
    report = json.loads(report_line)
    assert report["perplexity"] == math.exp(report["loss"])
    assert report.get("bits_per_byte") == (report["loss"] / math.log(2) if unit == "byte" else None)
    bits = f", {report['loss'] / math.log(2):.4f} bits per byte" if unit == "byte" else ""
    assert f"validation loss {report['loss']:.4f} nats per {unit}{bits}, perplexity {report['perplexity']:.2f}, over " in text


def test_the_summary_has_the_unit_of_the_objective() -> None:
    result = TrainingResult(3, 0.7, 0.5, "pair")
    assert training_code.format_summary(result, {}) == "validation loss 0.70 → 0.50 nats per pair"
    bytes_summary = training_code.format_summary(TrainingResult(3, 5.5, 2.5, "token"), {"bigram_baseline_loss": 2.45})
    assert bytes_summary == "validation loss 5.50 → 2.50 nats per byte; byte-bigram baseline 2.45"
