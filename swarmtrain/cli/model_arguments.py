"""Read the prompts and check the paths of the model commands before torch is imported, which takes seconds."""

import sys
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.config.user_files import describe_os_error, read_regular_file
from swarmtrain.errors import SwarmtrainError

_BYTE_TOKENIZER = "bytes"


def check_model_folder(path: Path) -> None:
    """Check that `path` is a folder. Raises SwarmtrainError if not."""
    if not path.is_dir():
        hint = "pass a run's save_dir, a checkpoint, or a folder with a config.json"
        raise SwarmtrainError("is not a folder", place=str(path), hint=hint)


def check_checkpoint_folder(path: Path) -> None:
    """Check that `path` is a folder, which may contain checkpoints. Raises SwarmtrainError if not."""
    if not path.is_dir():
        raise SwarmtrainError("has no complete checkpoint", place=str(path), hint="pass the trainer.save_dir of a run")


def check_tokenizer_file(tokenizer: Path | str | None) -> None:
    """Check that the tokenizer file exists, unless it is the byte tokenizer or None. Raises SwarmtrainError if not."""
    if tokenizer is not None and str(tokenizer) != _BYTE_TOKENIZER and not Path(tokenizer).exists():
        raise SwarmtrainError("cannot be read: no such file", place=str(tokenizer), hint="pass a tokenizer.json with --tokenizer")


def check_base_model_folder(path: Path | None) -> None:
    """Check that the folder of an adapter's base model exists, if one is passed. Raises SwarmtrainError if not."""
    if path is not None and not path.is_dir():
        raise SwarmtrainError("is not a folder", place=str(path), hint="pass the folder of the base model with --base")


def check_output_file(path: Path | None) -> None:
    """Check that the folder of the output file exists, if one is passed. Raises SwarmtrainError if not."""
    if path is not None and not path.absolute().parent.is_dir():
        raise SwarmtrainError("cannot be written: its folder does not exist", place=str(path), hint=f"mkdir -p {path.parent}")


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts in `arguments` and in `file` (one per line). If neither is passed, standard input is read as one prompt.

    Raises SwarmtrainError if there is no prompt, or `file` cannot be read.
    """
    prompts = [*arguments, *(line for line in _read_file_lines(file, "--prompts", "prompt") if line)]
    if not prompts and not file and not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not prompts:
        raise SwarmtrainError("there is no prompt", place="sample", hint="pass --prompt 'Once upon a time'")
    return prompts


def read_texts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the texts in `arguments` and in `file` (one per line). If neither is passed, each line of standard input is one text.

    Raises SwarmtrainError if there is no text, `file` cannot be read, or a line is empty (the output has one row per text).
    """
    lines = _read_file_lines(file, "--texts", "text")
    if not arguments and not file and not sys.stdin.isatty():
        lines = sys.stdin.read().splitlines()
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise SwarmtrainError(f"line {empty[0]} is empty", place=str(file or "standard input"), hint="write one text per line")
    if not (arguments or lines):
        raise SwarmtrainError("there is no text", place="embed", hint="pass --text 'Once upon a time'")
    return [*arguments, *lines]


def _read_file_lines(file: Path | None, option: str, item_noun: str) -> list[str]:
    try:
        return read_regular_file(file).decode().splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        message = describe_os_error(error) if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(message, place=str(file), hint=f"{option} needs a text file with one {item_noun} per line") from None
