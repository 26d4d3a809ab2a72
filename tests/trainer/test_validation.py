"""The validation loss counts each sample once, whatever the batch size and the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_contrastive
import test_preference
import torch
from torch.nn.functional import cross_entropy
from worlds import LocalWorld, merge_config, run_training

from swarmtrain.config import Config
from swarmtrain.protocol.distributed_env import reserve_port
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import open_data
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer

SAMPLES = 68
MICRO_BATCH_SIZES = {1: 1, 4: 2, 6: 3, 17: 17, 34: 2, 50: 10, 64: 8, 68: 4, 100: 25}
"""Samples per micro batch, by global batch size: the last micro batch of an evaluation is full, smaller, or the only one."""
SOME_SIZES = (6, 50, 64, 100)


def evaluate(folder: Path, config: dict[str, Any], size: int, topology: dict[str, Any], batch_sizes: Any) -> dict[int, dict[str, Any]]:
    """Return what `swarmtrain evaluate` prints on `size` ranks about the checkpoint in `folder`, by global batch size."""
    requests, ports = [], [reserve_port() for _ in batch_sizes]
    for batch_size, port in zip(batch_sizes, ports, strict=True):
        own = {"global_batch_size": batch_size, "micro_batch_size": MICRO_BATCH_SIZES[batch_size], **topology}
        whole = merge_config(config, topology=own, trainer={"eval_iterations": 100})
        arguments = {"config": json.dumps(whole), "model": str(folder / "run"), "tasks": [], "json": True}
        requests.append({"port": port.getsockname()[1], "arguments": arguments})
    name = "-".join(["evaluated", str(size), *topology])
    (folder / name).mkdir()
    (folder / name / "asked.json").write_text(json.dumps(requests))
    world = LocalWorld(folder / name, {}, size, script="evaluated_batches")
    assert world.wait() == [0] * size, world.read_log()
    for port in ports:
        port.close()
    reports = [json.loads(line) for line in (folder / name / "rank-0.log").read_text().splitlines() if line.startswith("{")]
    return dict(zip(batch_sizes, reports, strict=True))


@pytest.fixture(scope="module")
def trained_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of a language model, and its config, with 68 validation samples that have different numbers of loss tokens."""
    folder = tmp_path_factory.mktemp("language-model")
    random = np.random.default_rng(5)
    memory_map.write_token_files(folder / "validation", [random.integers(0, 64, size=SAMPLES * 32 + 1)], "uint8", {"loss_mask": True})
    (folder / "validation.mask.bin").write_bytes((random.random(SAMPLES * 32 + 1) < 0.3).astype(np.uint8).tobytes())
    own = merge_config(config, trainer={"train_iterations": 2}, data={"validation_data_prefixes": [str(folder / "validation")]})
    run_training(folder, own)
    return folder, own


@torch.no_grad()
def compute_loss_in_torch(folder: Path, config: dict[str, Any]) -> float:
    """Return the mean cross-entropy over all loss tokens of the validation data, from one sample at a time."""
    checkpoint = consolidated.find_checkpoint(folder / "run")
    model = Transformer(checkpoint.config.transformer_architecture, 0)
    model.initial_values = LoadedParameters(checkpoint.load_parameter)
    model.init_weights().eval()
    _, data = open_data(Config.from_json(json.dumps(config)))
    assert data
    assert len(data) == SAMPLES
    loss, tokens = 0.0, 0
    for number in range(SAMPLES):
        rows = data.load_samples(np.array([number]))
        loss += float(cross_entropy(model(rows.inputs)[0].double(), rows.targets[0], ignore_index=-1, reduction="sum"))
        tokens += int((rows.targets != -1).sum())
    return loss / tokens


@pytest.mark.parametrize(
    ("size", "topology"),
    [(1, {}), (2, {}), (3, {}), (2, {"pipe_parallel_size": 2}), (2, {"model_parallel_size": 2}), (2, {"data_parallel_type": "fsdp"})],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value),
)
def test_each_sample_counts_once(trained_run: tuple[Path, dict[str, Any]], size: int, topology: dict[str, Any]) -> None:
    folder, own = trained_run
    reports = evaluate(folder, own, size, topology, SOME_SIZES if topology else MICRO_BATCH_SIZES)
    assert {report["samples"] for report in reports.values()} == {SAMPLES}
    right = compute_loss_in_torch(folder, own)
    assert {batch_size: report["loss"] for batch_size, report in reports.items()} == pytest.approx(dict.fromkeys(reports, right), rel=1e-6)


@pytest.fixture(scope="module")
def tuned_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with a preference objective, and its config, with 68 validation pairs."""
    folder = tmp_path_factory.mktemp("preference")
    run_training(folder / "base", merge_config(config, trainer={"train_iterations": 1, "eval_iterations": 1}))
    test_preference.write_pairs(folder, "pairs", SAMPLES)
    data = {f"{kind}data_prefixes": [str(folder / "pairs-better")] for kind in ("", "validation_")}
    data |= {f"{kind}rejected_prefixes": [str(folder / "pairs-worse")] for kind in ("", "validation_")}
    trainer = {
        "init_from": str(folder / "base" / "run" / "step-00000001"),
        "save_frozen_parameters": False,
        "train_iterations": 3,
        "preference_config": {"beta": 0.5},
    }
    own = merge_config(config, data=data, trainer=trainer, transformer_architecture=test_preference.ADAPTERS["lora"])
    run_training(folder, own)
    return folder, own


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_pair_counts_once(tuned_run: tuple[Path, dict[str, Any]], size: int) -> None:
    folder, own = tuned_run
    reports = evaluate(folder, own, size, {}, SOME_SIZES)
    config = Config.from_json(json.dumps(own))
    _, data = open_data(config)
    assert data
    with torch.no_grad():
        right = test_preference.compute_loss_by_hand(config, consolidated.find_checkpoint(folder / "run"), data, np.arange(SAMPLES))
    for report in reports.values():
        assert (report["loss"], report["accuracy"]) == pytest.approx(right, rel=1e-5)
        assert report["samples"] == SAMPLES


@pytest.fixture(scope="module")
def embedding_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with a contrastive objective, and its config, with 68 validation queries."""
    folder = tmp_path_factory.mktemp("contrastive")
    test_contrastive.write_texts(folder, "texts", SAMPLES)
    data: dict[str, Any] = {}
    for kind in ("", "validation_"):
        data[f"{kind}data_prefixes"] = [str(folder / "texts-queries")]
        data[f"{kind}positive_prefixes"] = [str(folder / "texts-answers")]
        data[f"{kind}negative_prefixes"] = [str(folder / f"texts-{each}") for each in ("wrong", "wronger")]
    shape = {"embedding_head_config": {"proj_layers": [48, 24]}, "sequence_length": 16}
    trainer = {"train_iterations": 2, "contrastive_config": {}, "eval_iterations": 1}
    own = merge_config(config, data=data, transformer_architecture=shape, trainer=trainer)
    run_training(folder, own)
    return folder, own


@pytest.mark.parametrize(
    ("size", "topology"),
    [(1, {}), (2, {}), (3, {}), (2, {"pipe_parallel_size": 2})],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value),
)
def test_each_query_counts_once_among_as_many_candidates_as_any_other(
    embedding_run: tuple[Path, dict[str, Any]], size: int, topology: dict[str, Any]
) -> None:
    """By its definition the loss depends on the batch size, but not on the ranks: the last batch is filled with earlier samples."""
    folder, own = embedding_run
    reports = evaluate(folder, own, size, topology, SOME_SIZES)
    _, data = open_data(Config.from_json(json.dumps(own)))
    assert data
    model = test_contrastive.load_trained_model(consolidated.find_checkpoint(folder / "run"))
    ids = data.build_batch(0, SAMPLES).ids
    for batch_size, report in reports.items():
        losses = []
        for position in range(0, SAMPLES, batch_size):
            start = min(position, max(0, SAMPLES - batch_size))
            with torch.no_grad():
                losses += compute_query_losses(model, data, ids[start : start + batch_size])[position - start :]
        assert len(losses) == report["samples"] == SAMPLES
        assert report["loss"] == pytest.approx(np.mean(losses), rel=1e-5), batch_size


def compute_query_losses(model: Transformer, data: Any, ids: Any) -> list[float]:
    """Return the loss of each query among the candidates of all samples `ids`."""
    rows = data.load_samples(ids)
    vectors = model(*rows).view(len(ids), 4, -1)
    cosines = vectors[:, 0] @ torch.cat([vectors[:, 1], vectors[:, 2], vectors[:, 3]]).T
    return [float(loss) for loss in -(20.0 * cosines).log_softmax(1).diagonal()]
