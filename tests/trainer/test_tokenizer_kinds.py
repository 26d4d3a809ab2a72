"""Tokenizers of many kinds give the tokens that transformers gives, whatever class it loads them as."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.document_builders import CompletionBuilder
from swarmtrain.trainer.tokenize.readers import SourceRecord
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer

TEXT = Path(__file__).read_text()
UNK, BERT_UNK = "<unk>", "[UNK]"
BYTES = pre_tokenizers.ByteLevel.alphabet()
LLAMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def build_byte_level(specials: list[str], begin: str = "") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, initial_alphabet=BYTES, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    added = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, specials.index(begin))]) if begin else None
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), *([added] if added else [])])
    return tokenizer


def build_llama() -> Tokenizer:
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = LLAMA_DECODER
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False))
    settings_of = json.loads(tokenizer.to_str())
    settings_of["added_tokens"] = settings_of["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(settings_of))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def build_bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=BERT_UNK))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=400, special_tokens=specials, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def build_t5() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    specials = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=specials, unk_token=UNK, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], dict[str, Any]]] = {
    "Llama 2": (build_llama, {**LLAMA, "add_bos_token": True, "add_eos_token": False}, {"model_type": "llama"}),
    "Llama 2, old settings": (build_llama, {**LLAMA, "legacy": True}, {}),
    "Llama 2 without BOS": (build_llama, {**LLAMA, "add_bos_token": False}, {"model_type": "llama"}),
    "Llama 2 with EOS": (build_llama, {**LLAMA, "add_eos_token": True}, {"model_type": "llama"}),
    "Llama 2, generic class": (build_llama, {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "llama"}),
    "Llama 3": (
        lambda: build_byte_level(["<|begin_of_text|>", "<|eot_id|>"], "<|begin_of_text|>"),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        {"model_type": "llama"},
    ),
    "Llama 3 as LlamaTokenizer": (
        lambda: build_byte_level(["<|begin_of_text|>", "<|eot_id|>"], "<|begin_of_text|>"),
        {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        {"model_type": "llama"},
    ),
    "Qwen 2": (
        lambda: build_byte_level(IM),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        {"model_type": "qwen2"},
    ),
    "GPT-2": (
        lambda: build_byte_level(IM[:1]),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": IM[0], "eos_token": IM[0], "unk_token": IM[0]},
        {"model_type": "gpt2"},
    ),
    "GPT-2 with a new token": (
        lambda: build_byte_level(IM[:1]),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": IM[0], "eos_token": "<|im_end|>", "additional_special_tokens": ["<call>"]},
        {"model_type": "gpt2"},
    ),
    "BERT": (build_bert, {"tokenizer_class": "BertTokenizer"}, {"model_type": "bert"}),
    "T5": (build_t5, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}, {}),
    "no settings": (lambda: build_byte_level(IM), {}, {}),
}
text = some.text(some.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
texts = some.lists(
    text | some.sampled_from(["a  b", "<s>", "x</s>y", "<|im_end|>", " <|endoftext|> a", "def é():\n\t", "[SEP]", "漢字"]), min_size=1
)
_opened: dict[str, tuple[BaseTokenizer, Any]] = {}


def open_both(name: str, folder: Path) -> tuple[BaseTokenizer, Any]:
    """Return a tokenizer as the project opens it, and as transformers does."""
    if name not in _opened:
        build, tokenizer_config, config = KINDS[name]
        build().save(str(folder / "tokenizer.json"))
        for file, content in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
            if content:
                (folder / file).write_text(json.dumps(content))
        _opened[name] = tokenizer_backends.open_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    return _opened[name]


@pytest.mark.parametrize("name", KINDS)
@given(shown=texts)
@settings(max_examples=10, deadline=None)
def test_the_tokens_are_those_of_transformers(tmp_path_factory: pytest.TempPathFactory, name: str, shown: list[str]) -> None:
    ours, reference = open_both(name, tmp_path_factory.mktemp("kind"))
    for split in (False, True):
        for said, encoded in zip(shown, ours.encode(shown, split_special=split), strict=True):
            tokens = encoded.tokens.tolist()
            expected = reference(said, split_special_tokens=split).input_ids
            assert [*ours.begin_tokens, *tokens, *ours.end_tokens] == expected
            assert tokens == reference(said, split_special_tokens=split, add_special_tokens=False).input_ids
            assert ours.decode(tokens) == reference.decode(tokens, clean_up_tokenization_spaces=False)
        for encoded, plain in zip(
            ours.encode(shown, split_special=split), ours.encode_without_offsets(shown, split_special=split), strict=True
        ):
            assert encoded.tokens.tolist() == plain.tolist()
    assert tokenizer_backends.find_eos_token_ids(ours) >= ({reference.eos_token_id} if reference.eos_token else set())


@pytest.mark.parametrize("name", KINDS)
@given(prompt=text, completion=text)
@settings(max_examples=6, deadline=None)
def test_the_loss_tokens_of_a_completion_have_its_characters(
    tmp_path_factory: pytest.TempPathFactory, name: str, prompt: str, completion: str
) -> None:
    """As transformers says which token has a character."""
    ours, reference = open_both(name, tmp_path_factory.mktemp("kind"))
    [document] = CompletionBuilder(ours, "p", "c").build_documents([SourceRecord(0, {"p": prompt, "c": completion})])
    reference_encoding = reference(prompt + completion, add_special_tokens=False)
    assert document.tokens.tolist() == reference_encoding.input_ids
    assert document.loss_mask is not None
    places = range(len(prompt), len(prompt + completion))
    expected = {token for place in places if (token := reference_encoding.char_to_token(place)) is not None}
    assert expected <= set(document.loss_mask.nonzero()[0].tolist())
