"""Preference tuning: the loss is that of the tuned model and a frozen reference model, under every parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenize_helpers import write_lines
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from worlds import merge_config, read_losses, read_manifest, read_metric, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.objectives import PreferenceConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import TokenDataset, open_data
from swarmtrain.trainer.inference import evaluation
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.objectives.preference import PreferenceObjective
from swarmtrain.trainer.tokenize import pipeline
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions

SEQUENCE_LENGTH = 32
TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({}, 2),
    "tensor": ({"model_parallel_size": 2}, 2),
    "tensor and sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pipe": ({"pipe_parallel_size": 2}, 2),
    "fsdp": ({"data_parallel_type": "fsdp", "activation_checkpointing_type": "every_layer"}, 2),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"lora_config": {"rank": 4, "layers": ["query", "key", "value", "output", "up", "down"]}},
    "adapter": {"adapter_config": {}},
}


def write_pairs(folder: Path, name: str, count: int) -> None:
    """Write `count` prompts of 3 to 9 tokens, each with a preferred response of small token ids and a rejected one of large ids."""
    random = np.random.default_rng(count)
    prompts = [random.integers(0, 64, size=random.integers(3, 10)) for _ in range(count)]
    for kind, (low, high) in (("better", (0, 20)), ("worse", (40, 64))):
        answers = [random.integers(low, high, size=random.integers(2, 9)) for _ in prompts]
        documents = [np.concatenate(prompt_and_answer) for prompt_and_answer in zip(prompts, answers, strict=True)]
        memory_map.write_token_files(folder / f"{name}-{kind}", documents, "uint8", {"loss_mask": True})
        mask = np.concatenate([np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in zip(prompts, answers, strict=True)])
        (folder / f"{name}-{kind}.mask.bin").write_bytes(mask.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def base_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of a language model, and a config that tunes the model on pairs."""
    folder = tmp_path_factory.mktemp("base")
    run_training(folder, merge_config(config, trainer={"train_iterations": 3, "eval_iterations": 1}))
    for name, count in (("train", 60), ("validation", 24)):
        write_pairs(folder, name, count)
    data = {
        "data_prefixes": [str(folder / "train-better")],
        "rejected_prefixes": [str(folder / "train-worse")],
        "validation_data_prefixes": [str(folder / "validation-better")],
        "validation_rejected_prefixes": [str(folder / "validation-worse")],
    }
    begins = {"init_from": str(folder / "run" / "step-00000003"), "save_frozen_parameters": False, "train_iterations": 6}
    tuned = {**begins, "preference_config": {"beta": 0.5, "label_smoothing": 0.1}, "eval_iterations": 2}
    return folder, merge_config(config, data=data, trainer=tuned, transformer_architecture=ADAPTERS["lora"])


@pytest.fixture(scope="module")
def single_rank_run(base_run: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_training(folder, base_run[1])
    return folder


def load_trained_model(checkpoint: consolidated.ConsolidatedCheckpoint, *, tuned: bool) -> Transformer:
    architecture = checkpoint.config.transformer_architecture
    model = Transformer(architecture if tuned else architecture.model_copy(update={"lora_config": None, "adapter_config": None}), 0)
    model.initial_values = LoadedParameters(checkpoint.load_parameter)
    return model.init_weights().eval()


def compute_log_likelihood(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the log-likelihood of each response, from the logits alone."""
    return (
        -cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten(), ignore_index=-1, reduction="none")
        .view(targets.shape)
        .sum(1)
    )


def compute_loss_by_hand(
    config: Config, checkpoint: consolidated.ConsolidatedCheckpoint, data: TokenDataset, ids: Any
) -> tuple[float, float]:
    """Return the mean loss of pairs, and the fraction of pairs that is ranked correctly."""
    rows = data.load_samples(ids)
    (tuned, reference) = (
        compute_log_likelihood(load_trained_model(checkpoint, tuned=each), rows.inputs, rows.targets) for each in (True, False)
    )
    gained = (tuned - reference).view(-1, 2)
    preference_config = config.trainer.preference_config
    assert preference_config
    margins = preference_config.beta * (gained[:, 0] - gained[:, 1])
    smooth = preference_config.label_smoothing
    return float(((1 - smooth) * -logsigmoid(margins) + smooth * -logsigmoid(-margins)).mean()), float((margins > 0).double().mean())


@torch.no_grad()
def test_the_loss_is_that_of_two_models(base_run: tuple[Path, dict[str, Any]], single_rank_run: Path) -> None:
    measured, right = read_validation_losses(single_rank_run), read_metric(single_rank_run, "validation_accuracy")
    assert measured[0] == pytest.approx(np.log(2), abs=1e-4), "it begins as the other"
    assert measured[6] < measured[0] - 0.05
    assert 0.6 < right[6] < 1
    config = Config.from_json(json.dumps(base_run[1]))
    _, data = open_data(config)
    assert data
    found = consolidated.find_checkpoint(single_rank_run / "run")
    assert all(".lora." in name for name in found.manifest.tensors if name.startswith("model/"))
    assert compute_loss_by_hand(config, found, data, data.build_batch(0, 24).ids) == pytest.approx((measured[6], right[6]), abs=1e-4)
    assert read_manifest(single_rank_run, 6)["consumed_samples"] == 6 * 12


@pytest.mark.test_all_only("more topologies; the gate has the loss of two models, and LoRA in these topologies")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sharded_it_learns_the_same(base_run: tuple[Path, dict[str, Any]], single_rank_run: Path, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    assert run_training(tmp_path, merge_config(base_run[1], topology=topology), size) == pytest.approx(
        read_losses(single_rank_run), rel=1e-5
    )
    # At step 1 both models are equal and no pair is decided: only rounding ranks it.
    right, alike = (
        {step: part for step, part in read_metric(where, "accuracy").items() if step > 1} for where in (tmp_path, single_rank_run)
    )
    assert right == pytest.approx(alike)
    assert read_metric(tmp_path, "validation_accuracy")[6] == pytest.approx(read_metric(single_rank_run, "validation_accuracy")[6])


@torch.no_grad()
def test_adapters_learn_from_pairs_too(base_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    own = merge_config(base_run[1], transformer_architecture={"lora_config": None, **ADAPTERS["adapter"]})
    run_training(tmp_path / "one", own)
    assert read_validation_losses(tmp_path / "one")[6] < np.log(2) - 0.02
    config = Config.from_json(json.dumps(own))
    _, data = open_data(config)
    assert data
    assert compute_loss_by_hand(config, consolidated.find_checkpoint(tmp_path / "one" / "run"), data, data.build_batch(0, 24).ids)[
        0
    ] == pytest.approx(read_validation_losses(tmp_path / "one")[6], abs=1e-4)
    assert run_training(tmp_path / "two", merge_config(own, topology=TOPOLOGIES["pipe"][0]), 2) == pytest.approx(
        read_losses(tmp_path / "one"), rel=1e-5
    )


def test_it_generates_as_it_is_tuned(base_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Samples during preference tuning are those of the tuned model, not of the reference."""
    made = Transformer(Config.from_json(json.dumps(base_run[1])).transformer_architecture, 1).init_weights()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".b.weight"):
                parameter.normal_()
    tokens = torch.randint(64, (2, 8))
    wanted = made(tokens)[:, -1]
    made.objective = PreferenceObjective(PreferenceConfig())
    torch.testing.assert_close(made.compute_next_token_logits(tokens), wanted)
    tuned, reference = made(tokens)[:, -1].chunk(2)
    torch.testing.assert_close(tuned, wanted)
    assert (reference - wanted).abs().max() > 0.1, "the second copy is the reference model's"


def test_it_resumes_in_another_world(base_run: tuple[Path, dict[str, Any]], single_rank_run: Path, tmp_path: Path) -> None:
    run_training(tmp_path, merge_config(base_run[1], trainer={"train_iterations": 3}), 2)
    run_training(tmp_path, base_run[1])
    assert read_losses(tmp_path) == pytest.approx(read_losses(single_rank_run), rel=1e-5)


def test_long_responses_are_truncated_and_pairs_stay_pairs(base_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for kind, documents in (("better", [range(50), range(3)]), ("worse", [range(40), range(7)])):
        memory_map.write_token_files(tmp_path / kind, [np.array(document) for document in documents], "uint8")
    memory_map.write_token_files(tmp_path / "other", [np.arange(5)], "uint8")
    architecture = Config.from_json(json.dumps(base_run[1])).transformer_architecture
    data = TokenDataset([tmp_path / "better"], architecture, 1, companion_prefixes=[[tmp_path / "worse"]])
    rows = data.load_samples(np.array([1, 0]))
    assert (rows.targets >= 0).sum(1).tolist() == [2, 6, SEQUENCE_LENGTH, SEQUENCE_LENGTH]
    assert (data.count_loss_tokens(np.array([1, 0])), data.compute_loss_denominator(np.array([1, 0]))) == (8 + 2 * SEQUENCE_LENGTH, 2)
    with pytest.raises(TrainingError, match=r"other has 1 documents, but .*better has 2"):
        TokenDataset([tmp_path / "better"], architecture, 1, companion_prefixes=[[tmp_path / "other"]])


def test_pairs_whose_prompts_fill_the_window_are_reported_and_do_not_count(base_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The loss of an untrained adapter is ln 2, whatever the number of pairs without a response in the window."""
    window = base_run[1]["transformer_architecture"]["sequence_length"]
    for kind, answer in (("better", 1), ("worse", 60)):
        lengths = [window + 8, 4] * 12
        documents = [np.array([7] * length + [answer] * 3) for length in lengths]
        memory_map.write_token_files(tmp_path / kind, documents, "uint8", {"loss_mask": True})
        mask = np.concatenate([np.repeat([0, 1], [length, 3]) for length in lengths])
        (tmp_path / f"{kind}.mask.bin").write_bytes(mask.astype(np.uint8).tobytes())
    better, worse = [str(tmp_path / "better")], [str(tmp_path / "worse")]
    data = {"data_prefixes": better, "rejected_prefixes": worse}
    validation = {"validation_data_prefixes": better, "validation_rejected_prefixes": worse}
    own = merge_config(base_run[1], data={**data, **validation}, trainer={"train_iterations": 2})
    _, samples = open_data(Config.from_json(json.dumps(own)))
    assert samples
    assert samples.compute_loss_denominator(np.arange(24)) == 12
    run_training(tmp_path, own)
    assert read_validation_losses(tmp_path)[0] == pytest.approx(np.log(2), abs=1e-4)
    assert read_losses(tmp_path)[1] == pytest.approx(np.log(2), abs=1e-4)
    log = (tmp_path / "rank-0.log").read_text()
    assert log.count("have no loss token, and so do not count") == 1


PAIRS = [("red", ""), ("blue", "azul"), ("", "verde"), ("black", "negro")]


def tokenize_pairs(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> tuple[Path, Path]:
    """Tokenize both texts of `pairs` with `data tokenize`, and return the prefixes."""
    records = [{"first": first, "second": second} for first, second in pairs]
    name = write_lines(folder / "pairs.jsonl", records)
    for key in ("first", "second"):
        pipeline.tokenize_source_files(TokenizeOptions(str(folder / key), "bytes", key=key, workers=1, **options), [name])
    return folder / "first", folder / "second"


def test_pairs_of_which_one_text_was_skipped_are_refused(tmp_path: Path) -> None:
    """One record is skipped on each side, but not the same one: the numbers of documents are equal."""
    architecture = TransformerArchitectureConfig(sequence_length=16, vocab_size=256)
    first, second = tokenize_pairs(tmp_path, PAIRS)
    assert [len(MemoryMap(prefix).documents) for prefix in (first, second)] == [3, 3]
    with pytest.raises(TrainingError, match=r"skipped other records for .*second \(1\) than for .*first \(1\)"):
        TokenDataset([first], architecture, 1, companion_prefixes=[[second]])
    meta_path = first.with_name("first.meta.json")
    meta_path.write_text(json.dumps({key: value for key, value in json.loads(meta_path.read_text()).items() if "records" not in key}))
    with pytest.raises(TrainingError, match="skipped other records"):  # of an earlier version, which recorded only numbers
        TokenDataset([first], architecture, 1, companion_prefixes=[[second]])


def test_pairs_are_accepted_if_the_same_records_were_skipped(tmp_path: Path) -> None:
    architecture = TransformerArchitectureConfig(sequence_length=16, vocab_size=256)
    first, second = tokenize_pairs(tmp_path, [("a", "b"), ("", ""), ("c", "d")])
    assert len(TokenDataset([first], architecture, 1, companion_prefixes=[[second]])) == 2


def test_incompatible_settings_are_refused(base_run: tuple[Path, dict[str, Any]]) -> None:
    def refused(match: str, **sections: Any) -> None:
        with pytest.raises(ValidationError, match=match):
            Config.from_json(json.dumps(merge_config(base_run[1], **sections)))

    refused("set both or neither", trainer={"preference_config": None})
    refused("set both or neither", data={"rejected_prefixes": [], "validation_rejected_prefixes": []})
    refused("adapter parameters to train", transformer_architecture={"lora_config": None}, trainer={"save_frozen_parameters": True})
    refused("would change", trainer={"finetunable_parameters": ["norm"]})
    refused("context_parallel_size", topology={"context_parallel_size": 2})
    refused("are missing", data={"validation_rejected_prefixes": []})
    refused("has 2 entries for 1", data={"rejected_prefixes": ["a", "b"]})


@pytest.mark.usefixtures("_single_process")
def test_evaluation_gives_what_training_logged(
    base_run: tuple[Path, dict[str, Any]], single_rank_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"config": json.dumps(base_run[1]), "model": str(single_rank_run / "run"), "tasks": [], "json": False}
    assert evaluation.main(asked) == 0
    accuracy = f"accuracy {read_metric(single_rank_run, 'validation_accuracy')[6]:.1%}"
    assert (
        f"validation loss {read_validation_losses(single_rank_run)[6]:.4f} nats per pair, {accuracy}, over 24 samples"
        in capsys.readouterr().out
    )
