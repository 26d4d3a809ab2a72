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

START, END = "<|im_start|>", "<|im_end|>"
NAMED = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": "DEFAULT {{ bos_token }}"}]
TOKEN = {"__type": "AddedToken", "content": END, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FILE = {"chat_template.jinja": "FILE"}
FOLDERS: dict[str, dict[str, Any]] = {
    "config": {"tokenizer_config.json": {"bos_token": START, "eos_token": TOKEN, "chat_template": "CONFIG {{ bos_token }}"}},
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
    "file and config": {"tokenizer_config.json": {"chat_template": "CONFIG"}, **FILE},
    "list": {"tokenizer_config.json": {"chat_template": NAMED, "bos_token": START}},
    "dict": {"tokenizer_config.json": {"chat_template": {"default": "DEFAULT", "rag": "RAG"}}},
    "list and file": {"tokenizer_config.json": {"chat_template": NAMED}, **FILE},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"1": {**TOKEN, "special": True}}, "chat_template": "CONFIG"}},
}


def write_folder(folder: Path, files: dict[str, Any]) -> str:
    write_tokenizer(folder / "tokenizer.json")
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_and_template_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    ours = tokenizer_backends.open_tokenizer(write_folder(tmp_path, FOLDERS[name]))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, trust_remote_code=False)
    settings = tokenizer_backends.read_tokenizer_settings(ours.name)
    for token in ("bos_token", "eos_token", "unk_token"):
        assert tokenizer_backends.read_token_text(settings, token) == (getattr(reference, token) or "")
    if reference.eos_token:
        assert tokenizer_backends.find_eos_token_ids(ours) == {reference.eos_token_id}
    template = ChatTemplate(ours, None)
    assert template.source == reference.get_chat_template()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = reference.apply_chat_template(messages, tokenize=False)
    assert template._render_text(messages) == rendered


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "none of which is named default: tool_use"),
        (
            {"tokenizer_config.json": {"bos_token": "<new>", "chat_template": "{{ bos_token }}"}},
            "writes the bos_token '<new>', which is not a",
        ),
        ({"added_tokens.json": {"<new>": 400}}, "lacks the token '<new>' with id 400"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"400": {"content": "<new>"}}}}, "lacks the token '<new>' with id 400"),
    ],
)
def test_a_folder_to_which_transformers_would_add_tokens_or_whose_template_is_ambiguous_is_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    path = write_folder(tmp_path, files)
    with pytest.raises(TrainingError, match=message):
        ChatTemplate(tokenizer_backends.open_tokenizer(path), None)
