"""Data and model with different tokenizers are refused before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenize_helpers import write_lines, write_tokenizer
from worlds import LocalWorld, merge_config, run_training

from swarmtrain.config import Config
from swarmtrain.errors import DataError
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.tokenize import pipeline, tokenizer_check
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions


def write_other_tokenizer(path: Path) -> None:
    """Write a tokenizer with other tokens for each text, and a vocabulary of the same size."""
    write_tokenizer(path)
    settings = json.loads(path.read_text())
    settings["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(settings))


def tokenize_texts(folder: Path, tokenizer: str, name: str) -> Path:
    texts = write_lines(folder / "texts.jsonl", [{"text": "the run is done on each node " * 20}] * 8)
    pipeline.tokenize_source_files(TokenizeOptions(str(folder / name), tokenizer, workers=1), [texts])
    return folder / name


def check(config: Mapping[str, Any], *prefixes: Path, evaluated_model: Path | None = None, **sections: Any) -> None:
    whole = merge_config(dict(config), **sections)
    tokenizer_check.check_tokenizers(Config.from_json(json.dumps(whole)), [MemoryMap(prefix) for prefix in prefixes], evaluated_model)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json")
    return tokenize_texts(tmp_path, str(tmp_path / "tokenizer.json"), "tokens")


def test_token_files_of_two_tokenizers_are_refused_by_name(config: dict[str, Any], prefix: Path, tmp_path: Path) -> None:
    write_other_tokenizer(tmp_path / "other.json")
    other, byte_prefix = tokenize_texts(tmp_path, str(tmp_path / "other.json"), "other"), tokenize_texts(tmp_path, "bytes", "bytes")
    check(config, prefix, prefix)
    with pytest.raises(DataError) as raised:
        check(config, prefix, other)
    expected = f"{prefix} has the tokenizer {tmp_path}/tokenizer.json, but {other} has {tmp_path}/other.json, which assigns other tokens"
    assert raised.value.message == expected
    with pytest.raises(DataError, match="has bytes"):
        check(config, prefix, byte_prefix)
    check(config, prefix, other, byte_prefix, data={"allow_different_tokenizers": True})


def test_a_tokenizer_that_was_only_saved_again_is_the_same(config: dict[str, Any], prefix: Path, tmp_path: Path) -> None:
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    saved.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    assert path.read_bytes() != (tmp_path / "tokenizer.json").read_bytes()
    check(config, prefix, tokenize_texts(tmp_path, str(path), "again"))
    check(config, prefix, trainer={"init_from": str(tmp_path / "saved")})


def test_token_files_of_an_earlier_version_are_compared_by_their_tokenizer_file(
    config: dict[str, Any], prefix: Path, tmp_path: Path
) -> None:
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.no_padding()
    saved.save(str(tmp_path / "saved.json"))
    other = tokenize_texts(tmp_path, str(tmp_path / "saved.json"), "other")
    for each in (prefix, other):
        meta_path = each.with_name(f"{each.name}.meta.json")
        meta = json.loads(meta_path.read_text())
        del meta["tokenizer_identity"]
        meta_path.write_text(json.dumps(meta))
    check(config, prefix, other)
    tokenizer_check._compute_identity.cache_clear()
    (tmp_path / "saved.json").unlink()
    with pytest.raises(DataError, match=r"saved\.json, which assigns other tokens"):
        check(config, prefix, other)


def test_a_model_of_another_tokenizer_is_refused(config: dict[str, Any], prefix: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    check(config, prefix, trainer={"init_from": str(model)})  # has none
    write_other_tokenizer(model / "tokenizer.json")
    with pytest.raises(DataError, match=f"but the model in {model} has {model}/tokenizer.json"):
        check(config, prefix, trainer={"init_from": str(model)})
    with pytest.raises(DataError, match=f"but the model in {model}"):
        check(config, prefix, evaluated_model=model)


def test_a_run_is_refused_and_so_is_one_from_a_checkpoint_of_another_tokenizer(
    config: dict[str, Any], prefix: Path, tmp_path: Path
) -> None:
    byte_prefix = tokenize_texts(tmp_path, "bytes", "bytes")
    own = merge_config(
        config,
        data={"data_prefixes": [str(byte_prefix)], "validation_data_prefixes": []},
        transformer_architecture={"vocab_size": 512},
        trainer={"train_iterations": 1},
    )
    run_training(tmp_path / "first", own)
    mixed = merge_config(own, data={"validation_data_prefixes": [str(prefix)]})
    world = LocalWorld(tmp_path / "mixed", mixed, 1)
    assert world.wait() == [1]
    assert f"{byte_prefix} has the tokenizer bytes, but {prefix} has" in world.read_log()
    continued = merge_config(own, data={"data_prefixes": [str(prefix)]}, trainer={"load_dir": [str(tmp_path / "first" / "run")]})
    with pytest.raises(DataError, match=f"but the training data of {tmp_path / 'first' / 'run'} has bytes"):
        check(continued, prefix)
