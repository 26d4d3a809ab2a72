"""What the tests of `data prepare` share: a tokenizer, and files before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from swarmtrain.trainer.data.memory_map import MemoryMap

SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
ENDINGS = ("bin", "idx", "meta.json")


def tokenizer(path: Path) -> None:
    """Write a tokenizer with byte pairs, which cuts off and fills up and adds tokens, as those that are found do."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    made.enable_truncation(3)
    made.enable_padding()
    made.save(str(path))


def lines(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
    return str(path)


def read(prefix: Path) -> list[list[int]]:
    file = MemoryMap(prefix)
    file.check_documents()
    return [file.tokens[start : start + count].tolist() for start, count in file.documents.tolist()]


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}.{ending}").read_bytes() for ending in ENDINGS]
