"""The unit of a loss: what the loss is a mean over."""

from __future__ import annotations

from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.model.objective import Objective
from swarmtrain.trainer.tokenize.tokenize_options import BYTE_TOKENIZER

_BYTE_COUNT = 256


def find_loss_unit(objective: Objective, data: TokenDataset | None) -> str:
    """Return the unit of the loss of `objective` on `data`: "byte" if each token is a byte, else the objective's loss unit."""
    has_byte_tokens = data is not None and all(_has_byte_tokens(file) for file in data.token_files)
    return "byte" if objective.has_perplexity and has_byte_tokens else objective.loss_unit


def _has_byte_tokens(token_file: MemoryMap) -> bool:
    """Return whether each token is one byte of a text, according to the metadata: also not an EOS token, which has the id 256."""
    tokenizer = token_file.meta.get("prepared", {}).get("tokenizer", {})
    return (tokenizer.get("name"), tokenizer.get("vocab_size")) == (BYTE_TOKENIZER, _BYTE_COUNT)
