"""Check the paths of the model commands before torch is imported, which takes seconds. The commands themselves check the contents."""

from pathlib import Path

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
