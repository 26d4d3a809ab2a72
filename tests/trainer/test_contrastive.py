"""Contrastive training: the loss covers all texts of a global batch at once, however the batch is divided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from pydantic import ValidationError
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional
from worlds import (
    LocalWorld,
    merge_config,
    read_gradient_norms,
    read_losses,
    read_manifest,
    read_metric,
    read_validation_losses,
    run_training,
)

from swarmtrain.config import Config
from swarmtrain.config.schema.objectives import ContrastiveConfig
from swarmtrain.config.schema.transformer_architecture import EmbeddingHeadConfig, Pooling, TransformerArchitectureConfig
from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import TokenDataset, open_data
from swarmtrain.trainer.export.checkpoint_export import export_checkpoint
from swarmtrain.trainer.inference import evaluation, model_source
from swarmtrain.trainer.inference.embeddings import embed_documents
from swarmtrain.trainer.inference.parallel_model import open_parallel_model
from swarmtrain.trainer.model.embedding_head import EmbeddingHead
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.objectives.contrastive import ContrastiveObjective
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.document_builders import CompletionBuilder
from swarmtrain.trainer.tokenize.readers import SourceRecord
from swarmtrain.trainer.tokenize.sample_inspection import describe_samples
from swarmtrain.trainer.tokenize.shards import Document

TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({}, 2),
    "unequal shares": ({}, 4),
    "tensor": ({"model_parallel_size": 2}, 2),
    "tensor and sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pipe": ({"pipe_parallel_size": 2}, 2),
    "data, pipe": ({"pipe_parallel_size": 2}, 4),
    "fsdp": ({"data_parallel_type": "fsdp", "activation_checkpointing_type": "every_layer"}, 2),
    "fsdp, pipe": ({"data_parallel_type": "fsdp", "pipe_parallel_size": 2}, 4),
}
STEPS = 6


def write_texts(folder: Path, name: str, count: int) -> None:
    """Write `count` queries, a positive for each with tokens that match the query's, and two negatives with random tokens.

    A query begins with two tokens, the same for all, which are masked out.
    """
    random = np.random.default_rng(count)
    topics = [random.choice(60, size=random.integers(3, 7), replace=False) for _ in range(count)]
    queries = [np.concatenate([[61, 62], tokens]) for tokens in topics]
    kinds = {
        "answers": [random.permutation(59 - np.repeat(tokens, 2)) for tokens in topics],
        "wrong": [random.integers(0, 60, size=8) for _ in topics],
        "wronger": [random.integers(0, 60, size=random.integers(1, 9)) for _ in topics],
    }
    for kind, documents in kinds.items():
        memory_map.write_token_files(folder / f"{name}-{kind}", documents, "uint8")
    memory_map.write_token_files(folder / f"{name}-queries", queries, "uint8", {"loss_mask": True})
    mask = np.concatenate([np.repeat([0, 1], [2, len(query) - 2]) for query in queries])
    (folder / f"{name}-queries.mask.bin").write_bytes(mask.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def base_config(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("texts")
    data: dict[str, Any] = {}
    for name, validation, count in (("train", "", 120), ("validation", "validation_", 24)):
        write_texts(folder, name, count)
        data[f"{validation}data_prefixes"] = [str(folder / f"{name}-queries")]
        data[f"{validation}positive_prefixes"] = [str(folder / f"{name}-answers")]
        data[f"{validation}negative_prefixes"] = [str(folder / f"{name}-{kind}") for kind in ("wrong", "wronger")]
    shape = {"embedding_head_config": {"proj_layers": [48, 24]}, "sequence_length": 16, "dropout_after_mlp": 0.1}
    trainer = {"train_iterations": STEPS, "contrastive_config": {}, "eval_iterations": 2}
    schedule = {"learning_rate": 1e-3, "learning_rate_warmup_steps": 1, "learning_rate_decay_iters": STEPS}
    return merge_config(config, data=data, transformer_architecture=shape, trainer=trainer, learning_rate_scheduler=schedule)


@pytest.fixture(scope="module")
def single_rank_run(base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_training(folder, base_config)
    return folder


def compute_loss_by_hand(
    model: Transformer, data: TokenDataset, ids: Any, *, scale: float = 20.0, one_sided: bool = False
) -> tuple[Tensor, float]:
    """Return the mean loss of samples in one pass, from the model's hidden states and cosines; and the fraction that finds its answer."""
    rows, architecture = data.load_samples(ids), model.architecture
    hidden = model._compute_hidden_states(rows.inputs, architecture.sequence_length, None, None, has_reference=False)
    counts = (rows.targets != -1) * torch.arange(1, architecture.sequence_length + 1)
    pooled = (hidden * counts[:, :, None]).sum(1) / counts.sum(1, keepdim=True)
    for number, layer in enumerate(model.head.projections if isinstance(model.head, EmbeddingHead) else ()):
        pooled = layer(functional.gelu(pooled) if number else pooled)
    query, answer, *negatives = pooled.view(len(ids), 4, -1).unbind(1)
    candidates = torch.cat([answer, *negatives]) if not one_sided else torch.cat([answer, *negatives]).detach()
    cosines = functional.cosine_similarity(query[:, None], candidates[None], dim=2)
    accuracy = (cosines[:, : len(ids)].diagonal() >= cosines.amax(1)).double().mean()
    return -(scale * cosines).log_softmax(1).diagonal().mean(), float(accuracy)


def load_trained_model(checkpoint: consolidated.ConsolidatedCheckpoint) -> Transformer:
    model = Transformer(checkpoint.config.transformer_architecture, 0)
    model.initial_values = LoadedParameters(checkpoint.load_parameter)
    return model.init_weights().eval()


@torch.no_grad()
def test_the_validation_loss_is_that_of_whole_batches(base_config: dict[str, Any], single_rank_run: Path) -> None:
    measured, right = read_validation_losses(single_rank_run), read_metric(single_rank_run, "validation_accuracy")
    assert measured[STEPS] < measured[0] - 0.05
    _, data = open_data(Config.from_json(json.dumps(base_config)))
    assert data
    model = load_trained_model(consolidated.find_checkpoint(single_rank_run / "run"))
    batches = [data.build_batch(first, 12).ids for first in (0, 12)]
    wanted = [compute_loss_by_hand(model, data, ids) for ids in batches]
    assert measured[STEPS] == pytest.approx(np.mean([float(loss) for loss, _ in wanted]), rel=1e-5)
    assert 0 < right[STEPS] < 1
    assert right[STEPS] == pytest.approx(np.mean([found for _, found in wanted]))
    assert "head.weight" not in {name.removeprefix("model/") for name in read_manifest(single_rank_run, STEPS)["tensors"]}


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_step_is_that_of_one_pass_over_the_whole_batch(base_config: dict[str, Any], one_sided: bool, tmp_path: Path) -> None:
    own = merge_config(base_config, transformer_architecture={"dropout_after_mlp": 0.0})
    own["trainer"] |= {"train_iterations": 1, "contrastive_config": {"scale": 7.0, "query_side_only": one_sided}}
    made = run_training(tmp_path, own, 2)
    config = Config.from_json(json.dumps(own))
    data, _ = open_data(config)
    model = Transformer(config.transformer_architecture, config.trainer.seed).init_weights()
    loss, _ = compute_loss_by_hand(model, data, data.build_batch(0, 12).ids, scale=7.0, one_sided=one_sided)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
    assert made[1] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()
    assert read_gradient_norms(tmp_path)[1] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.test_all_only("five more topologies; the gate has one pass over the whole batch, and LoRA in these topologies")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sharded_it_learns_the_same(base_config: dict[str, Any], single_rank_run: Path, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    found = run_training(tmp_path, merge_config(base_config, topology=topology), size)
    assert found == pytest.approx(read_losses(single_rank_run), rel=1e-5)
    assert read_validation_losses(tmp_path) == pytest.approx(read_validation_losses(single_rank_run), rel=1e-5)
    for number in ("accuracy", "validation_accuracy"):
        assert read_metric(tmp_path, number) == pytest.approx(read_metric(single_rank_run, number))


def test_the_micro_batch_changes_nothing(base_config: dict[str, Any], single_rank_run: Path, tmp_path: Path) -> None:
    assert run_training(tmp_path, merge_config(base_config, topology={"micro_batch_size": 12})) == pytest.approx(
        read_losses(single_rank_run), rel=1e-5
    )


def test_unequal_and_changing_numbers_of_micro_batches_change_nothing(
    base_config: dict[str, Any], single_rank_run: Path, tmp_path: Path
) -> None:
    """The numbers change every three steps; a replica compares its texts with those of the others, wherever they were computed."""
    world = LocalWorld(tmp_path, base_config, 2, {"ASSIGNMENTS": "[[5, 1], [2, 4], [4, 2]]"}, script="forced_assignment")
    assert world.wait() == [0, 0], world.read_log()
    assert read_losses(tmp_path) == pytest.approx(read_losses(single_rank_run), rel=1e-5)
    assert read_validation_losses(tmp_path) == pytest.approx(read_validation_losses(single_rank_run), rel=1e-5)


def test_a_replica_without_samples_takes_part(base_config: dict[str, Any], tmp_path: Path) -> None:
    few = merge_config(base_config, topology={"global_batch_size": 4}, trainer={"train_iterations": 3})
    one, three = (run_training(tmp_path / str(size), few, size) for size in (1, 3))
    assert three == pytest.approx(one, rel=1e-5)


@pytest.mark.test_all_only("one more model or topology; the gate has the loss and its topologies")
def test_stages_that_take_turns(base_config: dict[str, Any], tmp_path: Path) -> None:
    deep = merge_config(base_config, transformer_architecture={"num_layers": 4}, trainer={"train_iterations": 3})
    turns = merge_config(deep, topology={"pipe_parallel_size": 2, "pipe_stages_per_rank": 2})
    assert run_training(tmp_path / "turns", turns, 2) == pytest.approx(run_training(tmp_path / "one", deep), rel=1e-5)


@pytest.mark.test_all_only("one more model or topology; the gate has the loss and its topologies")
def test_it_resumes_in_another_topology(base_config: dict[str, Any], single_rank_run: Path, tmp_path: Path) -> None:
    run_training(tmp_path, merge_config(base_config, trainer={"train_iterations": 2}), 2)
    run_training(tmp_path, merge_config(base_config, topology={"pipe_parallel_size": 2}), 2)
    assert read_losses(tmp_path) == pytest.approx(read_losses(single_rank_run), rel=1e-5)


@pytest.mark.usefixtures("_single_process")
def test_evaluation_gives_what_training_logged(
    base_config: dict[str, Any], single_rank_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"config": json.dumps(base_config), "model": str(single_rank_run / "run"), "tasks": [], "json": False}
    assert evaluation.main(asked) == 0
    assert f"validation loss {read_validation_losses(single_rank_run)[STEPS]:.4f} nats per query, accuracy " in capsys.readouterr().out


@pytest.mark.test_all_only("one more model or topology; the gate has the loss and its topologies")
def test_a_language_model_is_tuned_to_embed(
    config: dict[str, Any], base_config: dict[str, Any], single_rank_run: Path, tmp_path: Path
) -> None:
    """Its output head is dropped, even if it is untied, and new parameters are initialized at random."""
    untied = {"weight_tying": False, "sequence_length": 16, "norm_type": "rms", "mlp_type": "swiglu"}
    run_training(tmp_path / "first", merge_config(config, trainer={"train_iterations": 2}, transformer_architecture=untied))
    export_checkpoint(tmp_path / "first" / "run", tmp_path / "theirs", dtype=None, shard_bytes=10**9)
    own = merge_config(
        base_config, trainer={"save_frozen_parameters": False}, transformer_architecture={**untied, "lora_config": {"rank": 2}}
    )
    begun = {"1": "first/run/step-00000002", "2": "first/run/step-00000002", "their": "theirs"}
    made = {
        size: run_training(tmp_path / size, merge_config(own, trainer={"init_from": str(tmp_path / begins)}), 2 if size == "2" else 1)
        for size, begins in begun.items()
    }
    assert made["2"] == pytest.approx(made["1"], rel=1e-5)
    assert made["their"] == made["1"]
    kept = {name.removeprefix("model/") for name in read_manifest(tmp_path / "1", STEPS)["tensors"] if name.startswith("model/")}
    assert {name for name in kept if ".lora." not in name} == {
        f"head.projections.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")
    }
    found = consolidated.find_checkpoint(single_rank_run / "run")
    with pytest.raises(IncompatibleCheckpoint, match="cannot be used as a base model: it already has an embedding_head_config"):
        consolidated.open_base_weights(found.path, found.config.transformer_architecture, {})


@pytest.mark.parametrize("pooling", Pooling)
def test_what_an_embedding_is_pooled_from(pooling: Pooling) -> None:
    head = EmbeddingHead(TransformerArchitectureConfig(hidden_size=8), EmbeddingHeadConfig(pooling=pooling))
    hidden, targets = torch.randn(3, 5, 8), torch.tensor([[-1, 4, 4, -1, -1], [4, 4, 4, 4, 4], [-1] * 5])
    wanted = {
        Pooling.mean: [hidden[0, 1:3].mean(0), hidden[1].mean(0)],
        Pooling.weighted_mean: [(2 * hidden[0, 1] + 3 * hidden[0, 2]) / 5, torch.arange(1.0, 6) @ hidden[1] / 15],
        Pooling.last_token: [hidden[0, 2], hidden[1, 4]],
    }[pooling]
    found = head(hidden, targets=targets)
    assert torch.allclose(found[:2], functional.normalize(torch.stack(wanted), dim=1), atol=1e-6)
    assert torch.equal(found[2], torch.zeros(8)), "of nothing"
    narrow = head(hidden.bfloat16(), targets=targets)
    assert narrow.dtype is torch.float32


def test_samples_are_whole_texts_with_their_positives_and_negatives(base_config: dict[str, Any]) -> None:
    data, _ = open_data(Config.from_json(json.dumps(base_config)))
    assert (len(data), data.rows_per_sample, len(data.all_token_files)) == (120, 4, 4)
    rows = data.load_samples(np.array([3, 7]))
    query, answer = rows.inputs[4].tolist(), rows.inputs[5].tolist()
    count = query.index(0, 2) if 0 in query[2:] else len(query)
    assert query[:2] == [61, 62]
    assert rows.targets[4, :2].tolist() == [-1, -1], "what all queries begin with does not count"
    assert rows.targets[4, 2:count].tolist() == query[2:count], "each token counts itself, the last too"
    assert {59 - token for token in query[2:count]} <= set(answer)
    shown = list(map(str, describe_samples(Config.from_json(json.dumps(base_config)), 1)))
    assert len(shown) == 4
    assert "tokens count in the embedding" in shown[0]
    assert ["ignored" in shown[0], "counts " in shown[0], "ignored" in shown[1]] == [True, True, False]


@torch.no_grad()
def test_embeddings_of_texts_are_those_of_training(base_config: dict[str, Any], single_rank_run: Path) -> None:
    _, data = open_data(Config.from_json(json.dumps(base_config)))
    assert data
    model, rows = load_trained_model(consolidated.find_checkpoint(single_rank_run / "run")), data.load_samples(np.arange(6))
    wanted = model(rows.inputs, rows.targets)
    lengths = [int((row != -1).nonzero().max()) + 1 for row in rows.targets]
    documents = [
        Document(tokens[:length].numpy().astype(np.uint32), (targets[:length] != -1).numpy())
        for tokens, targets, length in zip(rows.inputs, rows.targets, lengths, strict=True)
    ]
    assert len(set(lengths)) > 3
    for batch in (1, 5, 100):
        assert torch.allclose(embed_documents(model, documents, batch, torch.device("cpu")), wanted, atol=1e-6)
    longer = Document(np.concatenate([documents[0].tokens, np.zeros(99, np.uint32)])[:99])
    assert embed_documents(model, [longer], 1, torch.device("cpu")).norm() == pytest.approx(1, abs=1e-5), "cut off"


@pytest.mark.test_all_only("one more model or topology; the gate has the loss and its topologies")
@pytest.mark.parametrize("pooling", Pooling)
@torch.no_grad()
def test_an_exported_model_makes_the_same_embeddings(base_config: dict[str, Any], pooling: Pooling, tmp_path: Path) -> None:
    head = {"pooling": pooling, "proj_layers": [48, 24]}
    shape = {"norm_type": "rms", "mlp_type": "swiglu", "lora_config": {}, "embedding_head_config": head}
    run_training(tmp_path, merge_config(base_config, transformer_architecture=shape, trainer={"train_iterations": 2}))
    words = {f"w{number}": number for number in range(62)} | {"<instruction>": 62, "<end>": 63}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))  # noqa: S106  # not a secret
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=None, shard_bytes=10**9, tokenizer=tmp_path / "tokenizer.json")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    texts = ["w1 w2 w3 w4", "w9", "w5 w5 w6 w7 w8 w9 w9 w9 w1"]
    model = load_trained_model(consolidated.find_checkpoint(tmp_path / "run"))
    for before in ("", "<instruction> w3 "):
        shaper = CompletionBuilder(tokenizer_backends.open_tokenizer(str(tmp_path / "tokenizer.json")), "before", "text")
        documents = shaper.build_documents([SourceRecord(0, {"before": before, "text": text}) for text in texts])
        wanted = embed_documents(model, documents, 8, torch.device("cpu")).numpy()
        assert theirs.encode(texts, prompt=before) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("_single_process")
def test_a_model_is_for_one_of_the_two(base_config: dict[str, Any], single_rank_run: Path) -> None:
    model = model_source.open_model(single_rank_run / "run")
    with pytest.raises(TrainingError, match="is an embedding model, and does not generate text"), open_parallel_model(model):
        pass
    with (
        pytest.raises(TrainingError, match="has no embedding head"),
        open_parallel_model(
            replace(model, architecture=model.architecture.model_copy(update={"embedding_head_config": None})),
            requires_embedding_model=True,
        ),
    ):
        pass


def test_incompatible_settings_are_refused(base_config: dict[str, Any]) -> None:
    def refused(reason: str, **sections: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=reason):
            Config.from_json(json.dumps(merge_config(base_config, **sections)))

    refused("is set, and data.positive_prefixes is not", data={name: [] for name in base_config["data"] if "tive" in name})
    refused("is set, and transformer_architecture.embedding_head_config is not", transformer_architecture={"embedding_head_config": None})
    refused("is null, and data.positive_prefixes is set", trainer={"contrastive_config": None})
    refused("has 3 entries for 1", data={"positive_prefixes": ["a", "b", "c"]})
    refused("has 1 per data prefix, but negative_prefixes has 2", data={"validation_negative_prefixes": ["a"]})
    refused("are missing, but there are negative_prefixes", data={"validation_negative_prefixes": []})
    refused("need positive_prefixes", data={"positive_prefixes": []})
    refused("different training objectives", data={"rejected_prefixes": ["a"]})
    refused("is computed from the full text", topology={"context_parallel_size": 2})
    refused("generates text", trainer={"sampling_config": {"prompts": ["a"]}})


def test_a_single_sample_is_compared_with_its_own_negatives(tmp_path: Path) -> None:
    """A batch of one sample: of its own two candidate texts the first is correct."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mine = functional.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
        found = ContrastiveObjective(ContrastiveConfig(scale=1.0)).compute_embedding_loss(
            mine, rows_per_sample=3, first_sample=0, global_batch_size=1, group=torch.distributed.group.WORLD
        )
        assert float(found.loss) == pytest.approx(float(torch.tensor([0.0, 0.5**0.5]).logsumexp(0)))
        assert found.vector_gradients[0, 1] < 0 < found.vector_gradients[2, 0], "nearer to the one, and the other away from it"
    finally:
        torch.distributed.destroy_process_group()
