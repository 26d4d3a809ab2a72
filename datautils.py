"""Datasets: real text into memory-mapped tokens, arrays, folders of images. Yours to edit; nothing here knows of ranks or nodes.

The quickstart's data needs no download: it is the source text of the Python standard library that this runs on,
a byte a token.
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
from swarmtrain.trainer.data.memory_map import MemoryMap, write
from swarmtrain.trainer.data.token_file import Tokens

_HELD_OUT_PERCENT = 10
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def python_sources(training: Path, held_out: Path) -> None:
    """Write the standard library's source text under the prefixes `training` and `held_out`, unless it is there already.

    Split by file, about one in ten held out, by a hash of the file's name: every node with the same Python gets the same split.
    """
    source = f"standard library of Python {platform.python_version()}"
    if _source(training) == _source(held_out) == source:
        return
    files = dict(_library())
    chosen = {name for name in files if int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT}
    for prefix, names in ((training, files.keys() - chosen), (held_out, chosen)):
        documents = (np.frombuffer(files[name].read_bytes(), dtype=np.uint8) for name in sorted(names))
        write(prefix, documents, "uint8", {"source": source})


class Arrays:
    """Rows of several arrays: files of NumPy's, .npy, which are not read before a row is asked for."""

    def __init__(self, *paths: Path | str) -> None:
        """Raises TrainingError if one cannot be read, or they have unequally many rows."""
        self._arrays = [_array(Path(path)) for path in paths]
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) > 1:
            told = ", ".join(f"{path} has {length}" for path, length in zip(paths, lengths, strict=True))
            raise TrainingError(f"unequally many rows: {told}", place="arrays", hint="row i of each belongs to row i of the others")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], ...]:
        """Return row `number` of each array."""
        return tuple(np.array(array[number]) for array in self._arrays)


class Images:
    """Images in a folder that has one folder for each kind. `kinds` has their names in order: a label is a place among these."""

    def __init__(self, folder: Path | str, size: tuple[int, int], mode: str = "RGB") -> None:
        """`size`: width and height that all are brought to. `mode` is Pillow's: RGB, or L for shades of grey.

        Raises TrainingError if there are none.
        """
        self._size, self._mode = size, mode
        self.kinds = sorted(path.name for path in Path(folder).glob("*/"))
        found = [(path, label) for label, kind in enumerate(self.kinds) for path in sorted((Path(folder) / kind).iterdir())]
        self._images = [(path, label) for path, label in found if path.suffix.lower() in _IMAGES]
        if not self._images:
            hint = f"FOLDER/KIND/NAME.png; there can be {', '.join(sorted(_IMAGES))}"
            raise TrainingError("holds no images", place=str(folder), hint=hint)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], int]:
        """Return image `number`, float32 (channels, height, width) in 0 to 1, and its label. Raises TrainingError if it is broken."""
        path, label = self._images[number]
        return _pixels(path, self._size, self._mode), label


class Captioned:
    """Images with a text for each: a folder with images and `metadata.jsonl`, whose lines have `file_name` and `text`, as Hugging
    Face's datasets have it."""

    def __init__(self, folder: Path | str, size: tuple[int, int], mode: str = "RGB") -> None:
        """For `size` and `mode` see Images. Raises TrainingError if there are none, or a line is none."""
        self._size, self._mode = size, mode
        path, hint = Path(folder) / "metadata.jsonl", 'its lines are {"file_name": …, "text": …}'
        self._images: list[tuple[Path, str]] = []
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                told = json.loads(line)
                self._images.append((Path(folder) / told["file_name"], str(told["text"])))
        except OSError as error:
            raise TrainingError(f"cannot be read: {error.strerror}", place=str(path), hint=hint) from None
        except (ValueError, LookupError, TypeError):
            raise TrainingError(f"line {len(self._images) + 1} tells of no image", place=str(path), hint=hint) from None
        if not self._images:
            raise TrainingError("tells of no images", place=str(path), hint=hint)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], str]:
        """Return image `number`, float32 (channels, height, width) in 0 to 1, and its text. Raises TrainingError if it is broken."""
        path, text = self._images[number]
        return _pixels(path, self._size, self._mode), text


def only(prefixes: Sequence[Path]) -> Path:
    """Return the single one of `prefixes`. Raises TrainingError if there is another number of them."""
    if len(prefixes) != 1:
        raise TrainingError(
            f"{len(prefixes)} prefixes, where the data set python_sources makes one",
            place="config data",
            hint="give data_prefixes and validation_data_prefixes one each",
        )
    return prefixes[0]


def bigram_loss(training: Path, held_out: Path) -> float:
    """Return the cross-entropy, in nats per byte, of `held_out` under a table of byte pairs counted in `training`, each count plus one.

    What a model must beat to have learned more than which byte follows which.
    """
    counts = np.ones((256, 256))
    for first, second in _pairs(MemoryMap(training)):
        counts += np.bincount(first.astype(np.int64) * 256 + second, minlength=256 * 256).reshape(256, 256)
    logarithms = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    losses = [-logarithms[first, second] for first, second in _pairs(MemoryMap(held_out))]
    return float(np.concatenate(losses).mean())


def _array(path: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise TypeError("it holds several, and each belongs in a file of its own")
        len(array)
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(f"is no array of rows: {error}", place=str(path), hint="numpy.save writes one") from None
    return array


def _pixels(path: Path, size: tuple[int, int], mode: str) -> np.ndarray[Any, Any]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            values = np.asarray(image.convert(mode).resize(size), dtype=np.float32) / 255
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TrainingError(f"is no image that can be read: {error}", place=str(path), hint="remove it, or save it again") from None
    return values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)


def _library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _NOT_THE_LIBRARY & set(name.parts):
            yield name.as_posix(), path


def _pairs(data: MemoryMap) -> Iterator[tuple[Tokens, Tokens]]:
    for start, length in data.documents:
        document = data.tokens[start : start + length]
        yield document[:-1], document[1:]


def _source(prefix: Path) -> str | None:
    try:
        source: str = json.loads(prefix.with_name(f"{prefix.name}.meta.json").read_text())["source"]
    except (OSError, ValueError, KeyError):
        return None
    return source
