"""Helpers of the tests of `data tokenize`: a tokenizer, and files before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from swarmtrain.trainer.data.memory_map import MemoryMap

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
ENDINGS = ("bin", "idx", "meta.json")


def write_tokenizer(path: Path) -> None:
    """Write a byte-pair tokenizer that truncates, pads and adds special tokens, as published tokenizers do."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    tokenizer.save(str(path))


def write_lines(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
    return str(path)


def read_documents(prefix: Path) -> list[list[int]]:
    file = MemoryMap(prefix)
    file.check_document_boundaries()
    return [file.tokens[start : start + count].tolist() for start, count in file.documents.tolist()]


def read_contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}.{ending}").read_bytes() for ending in ENDINGS]
