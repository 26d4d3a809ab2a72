"""Documents: packed undivided into samples, numbered within them, and partly used for validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swarmtrain.config import Config
from swarmtrain.config.schema.data import DataConfig, Packing
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.sample_index import pack_items_best_fit
from swarmtrain.trainer.data.samples import TokenDataset, open_data

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=32, reset_position_ids=True)


@given(sizes=some.lists(some.integers(1, 12), max_size=60))
@settings(max_examples=80, deadline=None)
def test_packing_is_tight(sizes: list[int]) -> None:
    """No pack exceeds its capacity, and no two packs would fit into one; so at most one is half empty."""
    packs = pack_items_best_fit(np.array(sizes, dtype=np.int64), 12)
    used = np.bincount(packs, np.array(sizes), minlength=0) if sizes else np.zeros(0)
    assert (used > 0).all(), "numbered without a gap"
    assert (used <= 12).all()
    assert len(used) < 2 or sorted(used)[0] + sorted(used)[1] > 12


@given(lengths=some.lists(some.integers(0, 11), min_size=1, max_size=30), seed=some.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_every_pair_within_a_document_comes_once(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int) -> None:
    folder = tmp_path_factory.mktemp("packs")
    tokens = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    tokens.append(np.array([sum(lengths)]))
    memory_map.write_token_files(folder / "a", tokens, "uint16")
    shape = SHAPE.model_copy(update={"vocab_size": 1 << 16})
    pairs = [(int(token), int(token) + 1) for document in tokens for token in document[:-1]]
    if not pairs:
        with pytest.raises(TrainingError, match="has no document with at least two tokens"):
            TokenDataset([folder / "a"], shape, seed, packing=Packing.documents)
        return
    data = TokenDataset([folder / "a"], shape, seed, packing=Packing.documents)
    batch = data.build_batch(0, len(data))
    rows = data.load_samples(batch.ids)
    counted = rows.targets >= 0
    assert sorted(zip(rows.inputs[counted].tolist(), rows.targets[counted].tolist(), strict=True)) == pairs
    assert batch.loss_tokens == len(pairs)
    assert rows.document_ids is not None
    document_of = np.repeat(np.arange(len(tokens)), [len(document) for document in tokens])
    for inputs, numbers, there in zip(rows.inputs, rows.document_ids, counted, strict=True):
        own = document_of[inputs[there].numpy()]
        numbered = np.unique(own, return_inverse=True)[1]
        assert own.tolist() == sorted(own)
        assert numbers[there].tolist() == numbered.tolist()


def test_documents_that_fit_are_not_split(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(3), np.arange(10, 22), np.arange(4, 7), np.arange(8, 9)], "uint8")
    data = TokenDataset([tmp_path / "a"], SHAPE, 0, packing=Packing.documents)
    rows = data.load_samples(np.arange(len(data)))
    assert rows.inputs.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 0], [0, 1, 4, 5]]
    assert rows.targets.tolist() == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21, -1], [1, 2, 5, 6]]
    assert rows.document_ids is not None
    assert rows.document_ids[3].tolist() == [0, 0, 1, 1]


@given(lengths=some.lists(some.integers(0, 9), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_documents_of_a_window_are_numbered_from_zero(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    """The ids are compared with a list of each token's document. Empty documents have no id."""
    lengths = [*lengths, 2]
    folder = tmp_path_factory.mktemp("windows")
    memory_map.write_token_files(folder / "a", [np.full(length, number % 32) for number, length in enumerate(lengths)], "uint8")
    data = TokenDataset([folder / "a"], SHAPE, 0)
    documents = data.load_samples(np.arange(len(data))).document_ids
    assert documents is not None
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for number, numbers in enumerate(documents.tolist()):
        own = document_of[:-1][4 * number : 4 * number + 4]
        assert numbers[: len(own)] == np.unique(own, return_inverse=True)[1].tolist()


def test_documents_are_numbered_only_when_configured(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.arange(9)], "uint8")
    plain = SHAPE.model_copy(update={"reset_attention_mask": False, "reset_position_ids": False})
    assert TokenDataset([tmp_path / "a"], plain, 0).load_samples(np.arange(1)).document_ids is None
    assert TokenDataset([tmp_path / "a"], plain, 0).build_empty_sample().document_ids is None
    numbered = TokenDataset([tmp_path / "a"], SHAPE, 0).build_empty_sample().document_ids
    assert numbered is not None
    assert numbered.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("packing", Packing)
def test_a_part_is_used_for_validation(tmp_path: Path, packing: Packing) -> None:
    """The last documents of each file, undivided; nothing of them is in the training data."""
    for name, first in (("a", 0), ("b", 100)):
        memory_map.write_token_files(tmp_path / name, [np.full(9, first + number) for number in range(10)], "uint8")
    shape = SHAPE.model_copy(update={"vocab_size": 256})
    data = DataConfig(data_prefixes=(tmp_path / "a", tmp_path / "b"), validation_fraction=0.2, packing=packing)
    training, validation = open_data(Config(transformer_architecture=shape, data=data))
    assert validation is not None
    seen = [set(np.unique(each.load_samples(np.arange(len(each))).targets)) - {-1} for each in (training, validation)]
    assert seen[0] == {*range(8), *range(100, 108)}
    assert seen[1] == {8, 9, 108, 109}


def test_too_few_documents_for_validation(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "a", [np.zeros(9)], "uint8")
    data = DataConfig(data_prefixes=(tmp_path / "a",), validation_fraction=0.2)
    with pytest.raises(TrainingError, match="1 documents are too few"):
        open_data(Config(transformer_architecture=SHAPE, data=data))
