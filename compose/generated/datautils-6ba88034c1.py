"""Datasets: text as memory-mapped tokens, arrays, folders of images. Edit this file as needed; it does not depend on ranks or nodes.

The quickstart's data needs no download: it is the source text of the running Python's standard library, one token per byte.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.memory_map import MemoryMap, write_token_files
from swarmtrain.trainer.data.token_file import Tokens

_VALIDATION_PERCENT = 10
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def write_python_sources(training_prefix: Path, validation_prefix: Path) -> None:
    """Write the standard library's source text as token files to `training_prefix` and `validation_prefix`, unless they exist.

    About 10 % of the files are validation data, selected by a hash of the name: every node with the same Python computes the same split.
    """
    source = f"standard library of Python {platform.python_version()}"
    if _read_source(training_prefix) == _read_source(validation_prefix) == source:
        return
    files = dict(_list_library_files())
    validation_names = {
        name for name in files if int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _VALIDATION_PERCENT
    }
    for prefix, names in ((training_prefix, files.keys() - validation_names), (validation_prefix, validation_names)):
        documents = (np.frombuffer(files[name].read_bytes(), dtype=np.uint8) for name in sorted(names))
        write_token_files(prefix, documents, "uint8", {"source": source})


class ArrayDataset:
    """Dataset of rows from several NumPy arrays, memory-mapped from .npy files."""

    def __init__(self, *paths: Path | str) -> None:
        """Open the arrays at `paths`. Raises TrainingError if a file cannot be read, or the arrays have different lengths."""
        self._arrays = [_load_array(Path(path)) for path in paths]
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) > 1:
            lengths_text = ", ".join(f"{path} has {length}" for path, length in zip(paths, lengths, strict=True))
            raise TrainingError(
                f"different numbers of rows: {lengths_text}",
                place="arrays",
                hint="pass arrays with the same number of rows: row i of each belongs to the same sample",
            )

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], ...]:
        """Return row `index` of each array."""
        return tuple(np.array(array[index]) for array in self._arrays)


class ImageFolderDataset:
    """Images in a folder with one subfolder per class. A label is an index into `classes`, the sorted class names."""

    def __init__(self, folder: Path | str, size: tuple[int, int], mode: str = "RGB") -> None:
        """Find the images in `folder`, which are resized to `size`, (width, height). `mode` is Pillow's: RGB, or L for grayscale.

        Raises TrainingError if there are no images.
        """
        self._size, self._mode = size, mode
        self.classes = sorted(path.name for path in Path(folder).glob("*/"))
        labeled_paths = [
            (path, label) for label, class_name in enumerate(self.classes) for path in sorted((Path(folder) / class_name).iterdir())
        ]
        self._images = [(path, label) for path, label in labeled_paths if path.suffix.lower() in _IMAGE_SUFFIXES]
        if not self._images:
            hint = f"store images as FOLDER/CLASS/NAME.png; supported formats: {', '.join(sorted(_IMAGE_SUFFIXES))}"
            raise TrainingError("contains no images", place=str(folder), hint=hint)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        """Return image `index`, float32 (channels, height, width) in [0, 1], and its label. Raises TrainingError if it is corrupt."""
        path, label = self._images[index]
        return _load_pixels(path, self._size, self._mode), label


class CaptionedImageDataset:
    """Captioned images: a folder with images and `metadata.jsonl`, whose lines have `file_name` and `text`, as in Hugging Face datasets."""

    def __init__(self, folder: Path | str, size: tuple[int, int], mode: str = "RGB") -> None:
        """Read the metadata in `folder`. `size`, `mode`: see ImageFolderDataset.

        Raises TrainingError if there are no images, or a line is invalid.
        """
        self._size, self._mode = size, mode
        path, hint = Path(folder) / "metadata.jsonl", 'each line must be {"file_name": …, "text": …}'
        self._images: list[tuple[Path, str]] = []
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self._images.append((Path(folder) / record["file_name"], str(record["text"])))
        except OSError as error:
            raise TrainingError(f"cannot be read: {error.strerror}", place=str(path), hint=hint) from None
        except (ValueError, LookupError, TypeError):
            raise TrainingError(f"line {len(self._images) + 1} is invalid", place=str(path), hint=hint) from None
        if not self._images:
            raise TrainingError("contains no images", place=str(path), hint=hint)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], str]:
        """Return image `index`, float32 (channels, height, width) in [0, 1], and its text. Raises TrainingError if it is corrupt."""
        path, text = self._images[index]
        return _load_pixels(path, self._size, self._mode), text


def require_single_prefix(prefixes: Sequence[Path]) -> Path:
    """Return the only prefix in `prefixes`. Raises TrainingError if the number of prefixes is not 1."""
    if len(prefixes) != 1:
        raise TrainingError(
            f"{len(prefixes)} prefixes, but the dataset python_sources writes only one",
            place="config data",
            hint="set data_prefixes and validation_data_prefixes to one prefix each",
        )
    return prefixes[0]


def compute_bigram_loss(training_prefix: Path, validation_prefix: Path) -> float:
    """Return the validation loss, in nats per byte, of a byte-bigram model of the training data with add-one smoothing.

    This is the baseline: a model with a lower loss has learned more than the frequencies of byte pairs.
    """
    counts = np.ones((256, 256))
    for first, second in _iterate_byte_pairs(MemoryMap(training_prefix)):
        counts += np.bincount(first.astype(np.int64) * 256 + second, minlength=256 * 256).reshape(256, 256)
    log_probabilities = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    losses = [-log_probabilities[first, second] for first, second in _iterate_byte_pairs(MemoryMap(validation_prefix))]
    return float(np.concatenate(losses).mean())


def _load_array(path: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise TypeError("it contains several arrays; save each in its own file")
        len(array)
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(f"is not an array of rows: {error}", place=str(path), hint="create it with numpy.save") from None
    return array


def _load_pixels(path: Path, size: tuple[int, int], mode: str) -> np.ndarray[Any, Any]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            values = np.asarray(image.convert(mode).resize(size), dtype=np.float32) / 255
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TrainingError(f"is not a readable image: {error}", place=str(path), hint="remove it, or save it again") from None
    return values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)


def _list_library_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _EXCLUDED_FOLDERS & set(name.parts):
            yield name.as_posix(), path


def _iterate_byte_pairs(token_file: MemoryMap) -> Iterator[tuple[Tokens, Tokens]]:
    for start, length in token_file.documents:
        document = token_file.tokens[start : start + length]
        yield document[:-1], document[1:]


def _read_source(prefix: Path) -> str | None:
    try:
        source: str = json.loads(prefix.with_name(f"{prefix.name}.meta.json").read_text())["source"]
    except (OSError, ValueError, KeyError):
        return None
    return source
