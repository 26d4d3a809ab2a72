"""Special tokens and chat templates are found where transformers finds them, in every layout of a tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenize_helpers import write_tokenizer

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.conversations import Conversation

START, END = "<|im_start|>", "<|im_end|>"
LOOP = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = [{"name": "tool_use", "template": f"TOOLS{LOOP}"}, {"name": "default", "template": f"DEFAULT {{{{ bos_token }}}}{LOOP}"}]
TOKEN = {"__type": "AddedToken", "content": END, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FILE = {"chat_template.jinja": f"FILE{LOOP}"}
FOLDERS: dict[str, dict[str, Any]] = {
    "config": {"tokenizer_config.json": {"bos_token": START, "eos_token": TOKEN, "chat_template": f"CONFIG {{{{ bos_token }}}}{LOOP}"}},
    "map": {"special_tokens_map.json": {"bos_token": START, "eos_token": TOKEN}, **FILE},
    "map and config": {
        "tokenizer_config.json": {"eos_token": START},
        "special_tokens_map.json": {"eos_token": END},
        **FILE,
    },
    "map and null": {
        "tokenizer_config.json": {"eos_token": None},
        "special_tokens_map.json": {"eos_token": END},
        **FILE,
    },
    "file and config": {"tokenizer_config.json": {"chat_template": f"CONFIG{LOOP}"}, **FILE},
    "list": {"tokenizer_config.json": {"chat_template": NAMED, "bos_token": START}},
    "dict": {"tokenizer_config.json": {"chat_template": {"default": f"DEFAULT{LOOP}", "rag": "RAG"}}},
    "list and file": {"tokenizer_config.json": {"chat_template": NAMED}, **FILE},
    "nothing": {},
    "new tokens": {"tokenizer_config.json": {"bos_token": "<new>", "eos_token": TOKEN}},
    "added tokens": {"tokenizer_config.json": {"added_tokens_decoder": {"400": {**TOKEN, "content": "<new>"}}}},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"1": {**TOKEN, "special": True}}, "chat_template": f"CONFIG{LOOP}"}},
}


def write_folder(folder: Path, files: dict[str, Any]) -> str:
    write_tokenizer(folder / "tokenizer.json")
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_and_template_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    ours = tokenizer_backends.open_tokenizer(write_folder(tmp_path, FOLDERS[name]))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, trust_remote_code=False)
    for role in ("bos_token", "eos_token", "unk_token"):
        assert ours.token_texts.get(role) == getattr(reference, role)
    if reference.eos_token:
        assert tokenizer_backends.find_eos_token_ids(ours) == {reference.eos_token_id}
    texts = ["a", " b\n", f"a{START}b{END}", "<new> é", "<|endoftext|>"]
    for text, encoded in zip(texts, ours.encode(texts), strict=True):
        assert [*ours.begin_tokens, *encoded.tokens, *ours.end_tokens] == reference(text).input_ids
        assert ours.decode(encoded.tokens.tolist()) == reference.decode(reference(text, add_special_tokens=False).input_ids)
    for text, encoded in zip(texts, ours.encode(texts, split_special=True), strict=True):
        assert encoded.tokens.tolist() == reference(text, add_special_tokens=False, split_special_tokens=True).input_ids
    vocabulary = {text: number for text, number in reference.get_vocab().items() if text != "[PAD]"}  # transformers adds it for padding
    assert ours.vocab_size == max(vocabulary.values()) + 1
    if reference.chat_template is None:
        return
    template = ChatTemplate(ours, None)
    assert template.source == reference.get_chat_template()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = reference.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert template.render_prompt(messages[:1]) == prompt


def test_the_template_for_tools_is_used_if_there_are_tools(tmp_path: Path) -> None:
    loop = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% if tools %}{{ tools }}{% endif %} {% endfor %}"
    named = [{"name": "tool_use", "template": f"T {loop}"}, {"name": "default", "template": f"D {loop}"}]
    template = ChatTemplate(
        tokenizer_backends.open_tokenizer(write_folder(tmp_path, {"tokenizer_config.json": {"chat_template": named}})), None
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render_conversation(Conversation(messages, [1]))[0] == "D user: a assistant: b "
    assert template.render_conversation(Conversation(messages, [1], tools=["t"]))[0] == "T user: a['t'] assistant: b['t'] "


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "none of which is named default: tool_use"),
        ({"tokenizer_config.json": "[1]"}, "cannot be loaded by transformers"),
        ({"tokenizer_config.json": {"eos_token": 3}}, "cannot be loaded by transformers"),
        ({"tokenizer_config.json": {"chat_template": "{% for %}"}}, "is not a valid template"),
    ],
)
def test_a_folder_that_transformers_cannot_load_or_whose_template_is_ambiguous_is_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    path = write_folder(tmp_path, files)
    with pytest.raises(TrainingError, match=message):
        ChatTemplate(tokenizer_backends.open_tokenizer(path), None)
