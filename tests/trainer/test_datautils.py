"""Datasets that users may edit: arrays, and folders of images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datautils import ArrayDataset, CaptionedImageDataset, ImageFolderDataset
from swarmtrain.errors import TrainingError


def test_rows_of_arrays(tmp_path: Path) -> None:
    inputs, labels = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(6)
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "labels.npy", labels)
    data = ArrayDataset(tmp_path / "inputs.npy", tmp_path / "labels.npy")
    assert len(data) == 6
    batches = list(DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    assert torch.equal(torch.cat([rows for rows, _ in batches]), torch.from_numpy(inputs))
    assert torch.cat([given for _, given in batches]).tolist() == labels.tolist()


def test_invalid_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "three.npy", np.zeros(3))
    np.save(tmp_path / "two.npy", np.zeros(2))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "number.npy", np.array(1.0))
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(TrainingError, match=r"three.npy has 3, .*two.npy has 2"):
        ArrayDataset(tmp_path / "three.npy", tmp_path / "two.npy")
    np.savez(tmp_path / "several.npz", a=np.zeros(3), b=np.zeros(3))
    for name in ("none.npy", "text.npy", "pickled.npy", "number.npy", "several.npz"):
        with pytest.raises(TrainingError, match=rf"{name}: is not an array of rows"):
            ArrayDataset(tmp_path / name)


def test_images_by_kind(tmp_path: Path) -> None:
    for kind, shade in (("night", 0), ("day", 255)):
        (tmp_path / kind).mkdir()
        for number in range(2):
            Image.new("RGB", (9, 5), (shade, 51, 0)).save(tmp_path / kind / f"{number}.png")
    (tmp_path / "day" / "notes.txt").write_text("no image")
    data = ImageFolderDataset(tmp_path, (4, 3))
    assert (data.classes, len(data)) == (["day", "night"], 4)
    images, labels = next(iter(DataLoader(data, batch_size=4)))  # type: ignore[arg-type]
    assert (images.shape, images.dtype, labels.tolist()) == ((4, 3, 3, 4), torch.float32, [0, 0, 1, 1])
    torch.testing.assert_close(images[:, :, 0, 0], torch.tensor([[1.0, 0.2, 0.0]] * 2 + [[0.0, 0.2, 0.0]] * 2))
    assert ImageFolderDataset(tmp_path, (4, 3), "L")[0][0].shape == (1, 3, 4)
    whole = (tmp_path / "day" / "0.png").read_bytes()
    for torn in (b"torn", whole[:40], whole[:20] + bytes(40)):
        (tmp_path / "day" / "0.png").write_bytes(torn)
        with pytest.raises(TrainingError, match=r"0.png: is not a readable image"):
            data[0]
    with pytest.raises(TrainingError, match="contains no images"):
        ImageFolderDataset(tmp_path / "none", (4, 3))


def test_images_with_a_text_each(tmp_path: Path) -> None:
    Image.new("RGB", (9, 5), (255, 51, 0)).save(tmp_path / "red.png")
    lines = [{"file_name": "red.png", "text": "red"}, {"file_name": "none.png", "text": "none"}]
    metadata_path = tmp_path / "metadata.jsonl"
    metadata_path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = CaptionedImageDataset(tmp_path, (4, 3))
    image, text = data[0]
    assert (len(data), image.shape, text) == (2, (3, 3, 4), "red")
    with pytest.raises(TrainingError, match=r"none.png: is not a readable image"):
        data[1]
    for wrong in ("no json", '{"text": "red"}', "[]"):
        metadata_path.write_text(f"{json.dumps(lines[0])}\n{wrong}\n")
        with pytest.raises(TrainingError, match="line 2 is invalid"):
            CaptionedImageDataset(tmp_path, (4, 3))
    metadata_path.write_text("")
    with pytest.raises(TrainingError, match="contains no images"):
        CaptionedImageDataset(tmp_path, (4, 3))
    with pytest.raises(TrainingError, match="cannot be read: No such file"):
        CaptionedImageDataset(tmp_path / "none", (4, 3))
