"""Samples are loaded in a thread, one micro batch ahead, and the losses are the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from swarmtrain.config import Config
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.data.token_batch import BackgroundLoader, TokenBatch
from swarmtrain.trainer.speed.session import open_session

TIMEOUT = 30
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}


def build_batch(ids: Ids) -> TokenBatch:
    return TokenBatch(torch.from_numpy(ids), torch.from_numpy(ids))


def test_samples_are_loaded_while_the_caller_does_something_else() -> None:
    may_end, threads = threading.Event(), []

    def load(ids: Ids) -> TokenBatch:
        threads.append(threading.current_thread())
        assert may_end.wait(TIMEOUT)
        return build_batch(ids)

    loader = BackgroundLoader(load)
    loader.start_loading(np.arange(3))
    may_end.set()
    assert loader.load_samples(np.arange(3)).inputs.tolist() == [0, 1, 2]
    assert loader.load_samples(np.arange(3)).inputs.tolist() == [0, 1, 2]
    assert [each is threading.current_thread() for each in threads] == [False, True], "each result is used once"


def test_samples_that_are_not_needed_after_all_are_discarded() -> None:
    def load(ids: Ids) -> TokenBatch:
        if ids[0] < 0:
            raise ValueError("invalid sample")
        return build_batch(ids)

    loader = BackgroundLoader(load)
    loader.start_loading(np.array([-1]))
    assert loader.load_samples(np.array([5, 6])).inputs.tolist() == [5, 6]
    loader.start_loading(np.array([-1]))
    loader.start_loading(np.array([7]))
    assert loader.load_samples(np.array([7])).inputs.tolist() == [7]


def test_an_error_is_raised_where_the_samples_are_needed() -> None:
    def load(_ids: Ids) -> TokenBatch:
        raise ValueError("invalid sample")

    loader = BackgroundLoader(load)
    loader.start_loading(np.arange(1))
    with pytest.raises(ValueError, match="invalid sample"):
        loader.load_samples(np.arange(1))


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_all_micro_batches_but_the_first_are_loaded_in_the_background(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_background: list[bool] = []
    original = TokenDataset._load_tokens

    def load_tokens(data: TokenDataset, ids: Ids) -> TokenBatch:
        in_background.append(threading.current_thread() is not threading.main_thread())
        return original(data, ids)

    monkeypatch.setattr(TokenDataset, "_load_tokens", load_tokens)
    values = {"topology": {"micro_batch_size": 2, "global_batch_size": 2 * micro_batches}, "transformer_architecture": SHAPE}
    config = Config.model_validate(values)
    losses = []
    for starts_early in (True, False):
        in_background.clear()
        if not starts_early:
            monkeypatch.setattr(TokenDataset, "start_loading", lambda *_: None)
        with open_session(config) as session:
            losses.append([session.run_step(number).loss for number in (1, 2, 3)])
            used = in_background[: 3 * micro_batches]
        assert used == [False] + [starts_early] * (3 * micro_batches - 1)
    assert losses[0] == losses[1]
