"""A pipe or a device in the place of a file is refused: to open a pipe would block until another process writes to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swarmtrain.cli import model_arguments
from swarmtrain.config.loader import read_config_text
from swarmtrain.config.user_files import UnreadableFileError, read_file_with_limit
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.checkpoint import file_digests, manifest
from swarmtrain.trainer.data import formats, token_file
from swarmtrain.trainer.export import checkpoint_export
from swarmtrain.trainer.huggingface import pretrained, safetensors
from swarmtrain.trainer.tokenize import chat_template, readers, tokenizer_backends
from swarmtrain.trainer.tokenize.tokenizer_backends import ByteTokenizer
from swarmtrain.view.dashboard import access_policy

DEADLINE_SECONDS = 30
# Each reads a file that the user names, or that has a fixed name in a folder that the user names.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("model.safetensors", safetensors.read_tensors),
    "the fingerprint of weights": ("model.safetensors", safetensors.read_fingerprint_bytes),
    "a model's config": ("config.json", pretrained.read_json),
    "the fingerprint of a model": ("config.json", lambda path: pretrained.compute_model_fingerprint(path.parent)),
    "a checkpoint's manifest": ("manifest.json", lambda path: manifest.read_manifest(path.parent)),
    "a checkpoint's file": ("rank-0", file_digests.hash_file),
    "mapped tokens": ("data.bin", lambda path: token_file.MappedArray(path, np.dtype(np.uint16))),
    "tokens read with pread": ("data.bin", lambda path: token_file.PreadArray(path, np.dtype(np.uint16))),
    "the format of tokens": ("data.bin", lambda path: formats.detect_token_file_format(path.with_suffix(""))),
    "a tokenizer": ("tokenizer.json", lambda path: tokenizer_backends.open_tokenizer(str(path))),
    "an exported tokenizer": ("tokenizer.json", checkpoint_export._find_tokenizer_files),
    "a chat template": ("chat.jinja", lambda path: chat_template._load_template(ByteTokenizer(), str(path))),
    "texts": ("texts.jsonl", lambda path: readers.find_source_files([str(path)])),
    "prompts": ("prompts.txt", lambda path: model_arguments.read_prompts([], path)),
    "a dashboard's token": ("token", access_policy._read_token),
    "a config": ("config.yml", read_config_text),
    "a script, a secret, or a file to import": ("script.py", lambda path: read_file_with_limit(path, 10)),
}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Fail a test that blocks."""

    def fail(*_: object) -> None:
        raise TimeoutError("the file was opened, and blocks")

    previous_handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_or_a_device_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises((SwarmtrainError, OSError, UnreadableFileError), match="it is a pipe or a device, not a file"):
        read(tmp_path / name)
