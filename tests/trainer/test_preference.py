"""Learning from pairs: the loss is that of two models, one of which stays as it was, however all is divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from worlds import changed, held_out, losses, manifest, told, train

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import Samples, open_data
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.use import evaluate

LONG = 32
TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({}, 2),
    "tensor": ({"model_parallel_size": 2}, 2),
    "tensor and sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pipe": ({"pipe_parallel_size": 2}, 2),
    "fsdp": ({"data_parallel_type": "fsdp", "activation_checkpointing_type": "every_layer"}, 2),
}
BESIDE: dict[str, dict[str, Any]] = {
    "lora": {"lora_config": {"rank": 4, "layers": ["query", "key", "value", "output", "up", "down"]}},
    "adapter": {"adapter_config": {}},
}


def pairs(folder: Path, name: str, count: int) -> None:
    """Write `count` prompts of 3 to 9 tokens, each with a better answer of small and a worse one of great numbers."""
    random = np.random.default_rng(count)
    prompts = [random.integers(0, 64, size=random.integers(3, 10)) for _ in range(count)]
    for kind, (low, high) in (("better", (0, 20)), ("worse", (40, 64))):
        answers = [random.integers(low, high, size=random.integers(2, 9)) for _ in prompts]
        documents = [np.concatenate(both) for both in zip(prompts, answers, strict=True)]
        memory_map.write(folder / f"{name}-{kind}", documents, "uint8", {"loss_mask": True})
        mask = np.concatenate([np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in zip(prompts, answers, strict=True)])
        (folder / f"{name}-{kind}.mask.bin").write_bytes(mask.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def base(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and a config that tunes it on pairs."""
    folder = tmp_path_factory.mktemp("base")
    train(folder, changed(config, trainer={"train_iterations": 3, "eval_iterations": 1}))
    for name, count in (("train", 60), ("held-out", 24)):
        pairs(folder, name, count)
    data = {
        "data_prefixes": [str(folder / "train-better")],
        "rejected_prefixes": [str(folder / "train-worse")],
        "validation_data_prefixes": [str(folder / "held-out-better")],
        "validation_rejected_prefixes": [str(folder / "held-out-worse")],
    }
    begins = {"init_from": str(folder / "run" / "step-00000003"), "save_frozen_parameters": False, "train_iterations": 6}
    tuned = {**begins, "preference_config": {"beta": 0.5, "label_smoothing": 0.1}, "eval_iterations": 2}
    return folder, changed(config, data=data, trainer=tuned, transformer_architecture=BESIDE["lora"])


@pytest.fixture(scope="module")
def alone(base: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, base[1])
    return folder


def model(found: whole.Whole, *, tuned: bool) -> Transformer:
    shape = found.config.transformer_architecture
    made = Transformer(shape if tuned else shape.model_copy(update={"lora_config": None, "adapter_config": None}), 0)
    made.initial = found.parameter
    return made.fill().eval()


def likelihood(of: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the log-likelihood of each answer, by the logits alone."""
    return (
        -cross_entropy(of(tokens).flatten(0, 1).double(), targets.flatten(), ignore_index=-1, reduction="none").view(targets.shape).sum(1)
    )


def by_hand(config: Config, found: whole.Whole, data: Samples, ids: Any) -> tuple[float, float]:
    """Return the mean loss of pairs, and the part of them that is judged right."""
    rows = data.load(ids)
    (tuned, before) = (likelihood(model(found, tuned=each), rows.inputs, rows.targets) for each in (True, False))
    gained = (tuned - before).view(-1, 2)
    wished = config.trainer.preference_config
    assert wished
    margins = wished.beta * (gained[:, 0] - gained[:, 1])
    smooth = wished.label_smoothing
    return float(((1 - smooth) * -logsigmoid(margins) + smooth * -logsigmoid(-margins)).mean()), float((margins > 0).double().mean())


@torch.no_grad()
def test_the_loss_is_that_of_two_models(base: tuple[Path, dict[str, Any]], alone: Path) -> None:
    measured, right = held_out(alone), told(alone, "held_out_accuracy")
    assert measured[0] == pytest.approx(np.log(2), abs=1e-4), "it begins as the other"
    assert measured[6] < measured[0] - 0.05
    assert 0.6 < right[6] < 1
    config = Config.from_json(json.dumps(base[1]))
    _, data = open_data(config)
    assert data
    found = whole.find(alone / "run")
    assert all(".lora." in name for name in found.content.tensors if name.startswith("model/"))
    assert by_hand(config, found, data, data.batch(0, 24).ids) == pytest.approx((measured[6], right[6]), abs=1e-4)
    assert manifest(alone, 6)["consumed_samples"] == 6 * 12


@pytest.mark.test_all_only("more topologies; the gate has the loss of two models, and LoRA in these topologies")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_divided_it_learns_the_same(base: tuple[Path, dict[str, Any]], alone: Path, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    assert train(tmp_path, changed(base[1], topology=topology), size) == pytest.approx(losses(alone), rel=1e-5)
    # Where a model begins no pair is decided, and which way rounding has it is no matter.
    right, alike = ({step: part for step, part in told(where, "accuracy").items() if step > 1} for where in (tmp_path, alone))
    assert right == pytest.approx(alike)
    assert told(tmp_path, "held_out_accuracy")[6] == pytest.approx(told(alone, "held_out_accuracy")[6])


@torch.no_grad()
def test_adapters_learn_from_pairs_too(base: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    own = changed(base[1], transformer_architecture={"lora_config": None, **BESIDE["adapter"]})
    train(tmp_path / "one", own)
    assert held_out(tmp_path / "one")[6] < np.log(2) - 0.02
    config = Config.from_json(json.dumps(own))
    _, data = open_data(config)
    assert data
    assert by_hand(config, whole.find(tmp_path / "one" / "run"), data, data.batch(0, 24).ids)[0] == pytest.approx(
        held_out(tmp_path / "one")[6], abs=1e-4
    )
    assert train(tmp_path / "two", changed(own, topology=TOPOLOGIES["pipe"][0]), 2) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_it_speaks_as_it_is_tuned(base: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Samples of a model that is tuned by pairs are those of the tuned model."""
    from swarmtrain.trainer.model import preference

    made = Transformer(Config.from_json(json.dumps(base[1])).transformer_architecture, 1).fill()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".b.weight"):
                parameter.normal_()
    tokens = torch.randint(64, (2, 8))
    wanted = made(tokens)[:, -1]
    preference.learn(made)
    torch.testing.assert_close(made.last(tokens), wanted)
    assert (made(tokens)[1, -1] - wanted[1]).abs().max() > 0.1, "for the second half it does not count"


def test_it_goes_on_in_another_world(base: tuple[Path, dict[str, Any]], alone: Path, tmp_path: Path) -> None:
    train(tmp_path, changed(base[1], trainer={"train_iterations": 3}), 2)
    train(tmp_path, base[1])
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)


def test_long_answers_are_cut_and_pairs_stay_pairs(base: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for kind, documents in (("better", [range(50), range(3)]), ("worse", [range(40), range(7)])):
        memory_map.write(tmp_path / kind, [np.array(document) for document in documents], "uint8")
    memory_map.write(tmp_path / "other", [np.arange(5)], "uint8")
    shape = Config.from_json(json.dumps(base[1])).transformer_architecture
    data = Samples([tmp_path / "better"], shape, 1, beside=[[tmp_path / "worse"]])
    rows = data.load(np.array([1, 0]))
    assert (rows.targets >= 0).sum(1).tolist() == [2, 6, LONG, LONG]
    assert (data.targets(np.array([1, 0])), data.counted(np.array([1, 0]))) == (8 + 2 * LONG, 2)
    with pytest.raises(TrainingError, match=r"other has 1 documents, and .*better 2"):
        Samples([tmp_path / "better"], shape, 1, beside=[[tmp_path / "other"]])


def test_what_does_not_go_together_is_refused(base: tuple[Path, dict[str, Any]]) -> None:
    def refused(match: str, **sections: Any) -> None:
        with pytest.raises(ValidationError, match=match):
            Config.from_json(json.dumps(changed(base[1], **sections)))

    refused("they go together", trainer={"preference_config": None})
    refused("they go together", data={"rejected_prefixes": [], "validation_rejected_prefixes": []})
    refused("something to tune beside", transformer_architecture={"lora_config": None}, trainer={"save_frozen_parameters": True})
    refused("would change it", trainer={"finetunable_parameters": ["norm"]})
    refused("context_parallel_size", topology={"context_parallel_size": 2})
    refused("are missing", data={"validation_rejected_prefixes": []})
    refused("are 2 for 1", data={"rejected_prefixes": ["a", "b"]})


@pytest.mark.usefixtures("_alone")
def test_what_it_is_worth_is_what_training_said(base: tuple[Path, dict[str, Any]], alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"config": json.dumps(base[1]), "model": str(alone / "run"), "tasks": [], "json": False}
    assert evaluate.main(asked) == 0
    accuracy = f"accuracy {told(alone, 'held_out_accuracy')[6]:.1%}"
    assert f"held-out loss {held_out(alone)[6]:.4f} nats per pair, {accuracy}, over 24 samples" in capsys.readouterr().out
