"""trainer.objective_config: a loss from outside the package trains under every form of parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_contrastive import write_texts
from test_preference import write_pairs
from torch.nn.functional import cross_entropy
from worlds import compute_deviation, merge_config, read_losses, read_metric, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.samples import open_data
from swarmtrain.trainer.inference import evaluation
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.objectives import build_objective

STEPS = 4
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2},
    "pipe": {"pipe_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


def select_objective(config: dict[str, Any], name: str, **arguments: Any) -> dict[str, Any]:
    values = {"_target_": f"custom_objectives.{name}", **arguments}
    return merge_config(config, trainer={"objective_config": values, "train_iterations": STEPS})


@pytest.fixture(scope="module")
def focal_config(config: dict[str, Any]) -> dict[str, Any]:
    return select_objective(config, "FocalLoss", gamma=2.0)


@pytest.fixture(scope="module")
def single_rank_run(focal_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_training(folder, focal_config)
    return folder


def test_the_loss_is_the_formula(focal_config: dict[str, Any], single_rank_run: Path) -> None:
    config = Config.from_json(json.dumps(focal_config))
    data, _ = open_data(config)
    rows = data.load_samples(data.build_batch(0, config.topology.samples_per_step).ids)
    logits = Transformer(config.transformer_architecture, config.trainer.seed).init_weights()(rows.inputs)
    losses = cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), reduction="none")
    expected = (1 - torch.exp(-losses)).square() * losses
    assert read_losses(single_rank_run)[1] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert read_losses(single_rank_run)[STEPS] < read_losses(single_rank_run)[1]
    assert read_metric(single_rank_run, "accuracy") == {}


def test_replicas_are_one_process_bit_for_bit(focal_config: dict[str, Any], single_rank_run: Path, tmp_path: Path) -> None:
    assert run_training(tmp_path, focal_config, 2) == read_losses(single_rank_run)
    assert read_validation_losses(tmp_path) == read_validation_losses(single_rank_run)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_it_is_the_same_in_every_topology(focal_config: dict[str, Any], single_rank_run: Path, name: str, tmp_path: Path) -> None:
    chunked = merge_config(focal_config, topology=TOPOLOGIES[name], trainer={"loss_chunk_size": 24})
    assert compute_deviation(run_training(tmp_path, chunked, 2), read_losses(single_rank_run)) < 1e-6
    assert compute_deviation(read_validation_losses(tmp_path), read_validation_losses(single_rank_run)) < 1e-6


@pytest.mark.usefixtures("_single_process")
def test_evaluation_reports_no_perplexity(focal_config: dict[str, Any], single_rank_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"config": json.dumps(focal_config), "model": str(single_rank_run / "run"), "tasks": [], "json": False}
    assert evaluation.main(options) == 0
    assert f"validation loss {read_validation_losses(single_rank_run)[STEPS]:.4f} nats per token, over " in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["MeanLogLikelihoodMargin", "SquaredDistance"])
def test_losses_over_pairs_and_over_vectors(config: dict[str, Any], objective: str, tmp_path: Path) -> None:
    """Without an adapter, which trainer.preference_config needs."""
    if objective == "SquaredDistance":
        write_texts(tmp_path, "train", 60)
        prefixes = {"data_prefixes": [str(tmp_path / "train-queries")], "positive_prefixes": [str(tmp_path / "train-answers")]}
    else:
        write_pairs(tmp_path, "train", 60)
        prefixes = {"data_prefixes": [str(tmp_path / "train-better")], "rejected_prefixes": [str(tmp_path / "train-worse")]}
    head = {"embedding_head_config": {} if objective == "SquaredDistance" else None}
    base = merge_config(select_objective(config, objective), transformer_architecture=head)
    base["data"] = prefixes
    one = run_training(tmp_path / "one", base)
    assert one[STEPS] < 0.95 * one[1]
    assert run_training(tmp_path / "data", base, 2) == pytest.approx(one, rel=1e-5)
    assert run_training(tmp_path / "pipe", merge_config(base, topology=TOPOLOGIES["pipe"]), 2) == pytest.approx(one, rel=1e-5)


def test_an_objective_that_does_not_fit_is_refused(focal_config: dict[str, Any]) -> None:
    def refused(match: str, target: str, **sections: Any) -> None:
        values = merge_config(focal_config, **sections)
        values["trainer"]["objective_config"] = {"_target_": target, **({"gamma": 1.0} if "Focal" in target else {})}
        with pytest.raises(TrainingError, match=match):
            build_objective(Config.from_json(json.dumps(values)))

    refused("module not found", "no_such_module.Loss")
    refused("custom_objectives has no FocalLos", "custom_objectives.FocalLos")
    refused("config trainer.objective_config: dict is not an Objective", "builtins.dict")
    refused("needs vectors, but .* is null", "custom_objectives.SquaredDistance")
    refused("needs logits, but .* is set", "custom_objectives.FocalLoss", transformer_architecture={"embedding_head_config": {}})
    pairs = "custom_objectives.MeanLogLikelihoodMargin"
    refused("context_parallel_size above 1: it needs full sequences", pairs, topology={"context_parallel_size": 2})
