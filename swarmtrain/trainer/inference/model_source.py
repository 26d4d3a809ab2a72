"""Open a model for inference: the newest checkpoint of a run, a single checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config import Config, huggingface_config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import CheckpointError, TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.document_builders import AddedTokens
from swarmtrain.trainer.tokenize.tokenize_options import BYTE_TOKENIZER
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer

_BYTE_VOCABULARY_SIZE = 257
"""Vocabulary size of the byte tokenizer: 256 bytes and an EOS token."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded: its architecture, and a function that loads full parameters."""

    path: Path
    step: int | None
    """Number of optimizer steps for which the model was trained; None if unknown."""
    architecture: TransformerArchitectureConfig
    load_parameter: Callable[[str, torch.Size], Tensor]
    tokenizer_names: tuple[str, ...]
    """Candidates for the model's tokenizer, the most likely first: paths, or BYTE_TOKENIZER."""
    added_tokens: AddedTokens | None = None
    """What was added to each text of the training data; None if unknown: then what the tokenizer adds."""
    chat_template: str | None = None
    """Source text of the chat template of the training data; None if these are not conversations, or if unknown."""
    stop_tokens: frozenset[int] = frozenset()
    """Ids of the tokens with which the model ends a text, as far as they are recorded."""

    def get_begin_tokens(self, tokenizer: BaseTokenizer) -> Sequence[int]:
        """Return the tokens with which a prompt begins, as the texts of the training data do."""
        return tokenizer.begin_tokens if self.added_tokens is None else self.added_tokens.begin

    def find_stop_tokens(self, tokenizer: BaseTokenizer) -> set[int]:
        """Return the tokens that end a generated text: the recorded ones, and the EOS token of `tokenizer`."""
        return {*self.stop_tokens, *tokenizer_backends.find_eos_token_ids(tokenizer)}

    def open_tokenizer(self, name: str | None) -> BaseTokenizer:
        """Return the tokenizer `name`; None: the model's own tokenizer.

        Raises TrainingError if there is no tokenizer, or if its vocabulary is too large for the model.
        """
        return open_model_tokenizer((name,) if name else self.tokenizer_names, self.architecture, str(self.path), "--tokenizer")


def open_model_tokenizer(
    tokenizer_names: Sequence[str], architecture: TransformerArchitectureConfig, place: str, tokenizer_option: str
) -> BaseTokenizer:
    """Open and return the first of the tokenizers `tokenizer_names` for a model with `architecture`.

    `place` (the model) and `tokenizer_option` (the option that sets the tokenizer) are shown in errors. Raises TrainingError if
    `tokenizer_names` is empty, or if the tokenizer's vocabulary is too large for the model.
    """
    if not tokenizer_names:
        raise TrainingError("does not record its tokenizer", place=place, hint=f"pass its tokenizer.json with {tokenizer_option}")
    encoder = tokenizer_backends.open_tokenizer(tokenizer_names[0])
    if encoder.vocab_size > architecture.vocab_size:
        reason = f"has {encoder.vocab_size} tokens, but the vocabulary of the model has only {architecture.vocab_size}"
        raise TrainingError(
            reason, place=f"tokenizer {encoder.name}", hint=f"pass the tokenizer of the model's training data with {tokenizer_option}"
        )
    return encoder


def open_model(path: Path, base_model: Path | None = None) -> ModelSource:
    """Return the model at `path`: a save_dir, a checkpoint or a Hugging Face folder.

    `base_model`: folder of the base model, if the checkpoint has only adapters and the base model's folder was moved. Raises
    CheckpointError if there is no model at `path`, or if it cannot be read.
    """
    if (path / pretrained.CONFIG_FILE).exists():
        architecture = huggingface_config.read_architecture(
            pretrained.read_json(path / pretrained.CONFIG_FILE), str(path / pretrained.CONFIG_FILE)
        )
        sizes = {name: parameter.shape for name, parameter in Transformer(architecture, 0).named_parameters()}
        tokenizer_path = path / "tokenizer.json"
        names = (str(tokenizer_path),) if tokenizer_path.exists() else _list_byte_tokenizers(architecture)
        loader = pretrained.build_parameter_loader(path, architecture, sizes)
        return ModelSource(path, None, architecture, loader, names, stop_tokens=frozenset(read_generation_stop_tokens(path)))
    if not path.is_dir():
        raise CheckpointError(
            "is not a folder", place=str(path), hint="pass a run's save_dir, a checkpoint, or a folder with a config.json"
        )
    checkpoint = consolidated.find_checkpoint(path, base_model)
    config = checkpoint.config
    return ModelSource(
        checkpoint.path,
        checkpoint.manifest.step,
        config.transformer_architecture,
        checkpoint.load_parameter,
        list_tokenizer_candidates(config),
        read_added_tokens(config),
        read_chat_template(config),
        frozenset(read_stop_tokens(config)),
    )


def list_tokenizer_candidates(config: Config) -> tuple[str, ...]:
    """Return candidates for the tokenizer of the config's data, the most likely first: paths, or BYTE_TOKENIZER."""
    recorded = [name for prefix in config.data.data_prefixes if (name := _find_recorded_tokenizer(prefix))]
    return (*recorded, *_list_byte_tokenizers(config.transformer_architecture))


def read_stop_tokens(config: Config) -> set[int]:
    """Return the tokens with which a model of `config` ends a text, as far as its training data and its base model record them."""
    tokens = read_generation_stop_tokens(config.trainer.init_from) if config.trainer.init_from else set[int]()
    for prefix in config.data.data_prefixes:
        meta = _read_json(formats.build_token_file_path(prefix, "meta.json"))
        tokens |= {*meta.get("stop_tokens", ()), *_read_added_tokens(meta).end[-1:]}
    return tokens


def read_generation_stop_tokens(folder: Path) -> set[int]:
    """Return the EOS tokens of a Hugging Face model: those in generation_config.json, or else in config.json. Empty if there are none."""
    for name in ("generation_config.json", pretrained.CONFIG_FILE):
        tokens = _read_json(folder / name).get("eos_token_id")
        if tokens is not None:
            return set(tokens if isinstance(tokens, list) else [tokens])
    return set()


def read_added_tokens(config: Config) -> AddedTokens | None:
    """Return what was added to each text of the config's data; None if its files do not record it."""
    metas = [_read_json(formats.build_token_file_path(prefix, "meta.json")) for prefix in config.data.data_prefixes[:1]]
    return _read_added_tokens(metas[0]) if metas and "prepared" in metas[0] else None


def read_chat_template(config: Config) -> str | None:
    """Return the source text of the chat template with which the config's data was tokenized; None if there is none."""
    metas = (_read_json(formats.build_token_file_path(prefix, "meta.json")) for prefix in config.data.data_prefixes)
    sources = (meta.get("prepared", {}).get("options", {}).get("chat_template") for meta in metas)
    return next(filter(None, sources), None)


def _read_added_tokens(meta: Mapping[str, Any]) -> AddedTokens:
    """Return what `data tokenize` has added to each text, according to the metadata of a token file."""
    options = meta.get("prepared", {}).get("options", {})
    earlier_option = options.get("eos_token")  # in files that were written before begin_tokens and end_tokens were recorded
    end_tokens = options.get("end_tokens", [] if earlier_option is None else [earlier_option])
    return AddedTokens(tuple(meta.get("begin_tokens", ())), tuple(end_tokens))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        content = json.loads(read_regular_file(path))
        return content if isinstance(content, dict) else {}
    return {}


def _list_byte_tokenizers(architecture: TransformerArchitectureConfig) -> tuple[str, ...]:
    return (BYTE_TOKENIZER,) if architecture.vocab_size <= _BYTE_VOCABULARY_SIZE else ()


def _find_recorded_tokenizer(prefix: Path) -> str | None:
    """Return the tokenizer that `data tokenize` has recorded in the token files of `prefix`.

    None if no tokenizer is recorded, or if it has changed since the files were written.
    """
    try:
        recorded = json.loads(read_regular_file(formats.build_token_file_path(prefix, "meta.json")))["prepared"]["tokenizer"]
        return str(recorded["name"]) if tokenizer_backends.open_tokenizer(recorded["name"]).sha256 == recorded["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError, TrainingError):
        return None
