"""A model is used: what it says does not depend on how it is computed, and what it is worth is what training said."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import World, changed, held_out, losses, train

from swarmtrain.config import Config
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import EXIT_ERROR, CheckpointError, TrainingError
from swarmtrain.trainer.huggingface.export import export
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.prepare.encoders import Bytes
from swarmtrain.trainer.use import evaluate, generate, source
from swarmtrain.trainer.use.cache import cached
from swarmtrain.trainer.use.generate import How
from swarmtrain.trainer.use.text import Stream

GREEDY = How(temperature=0)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_attention_heads": 4, "sequence_length": 48}
TOLD = {"reset_attention_mask": True, "reset_position_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "windows, shared keys": {"num_local_attention_heads": 2, "local_attention_window_size": 5, "attention_num_kv_heads": 2},
    "learned positions": {"learned_positions": True, "relative_position_embedding_type": "none", "parallel_residual": True},
    "neighbours turn": {"relative_position_embedding_type": "rotary_complex", "key_query_norm": True, "weight_tying": False},
    "u-muP": {"umup": {"enable": True}, "weight_tying": False, "mlp_type": "swiglu", "norm_type": "rms"},
}
GATED = {"vocab_size": 256, "norm_type": "rms", "mlp_type": "swiglu"}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [30, 31, 32, 33, 34]]


def model(kind: str) -> Transformer:
    """A model that says different things after different prompts."""
    made = Transformer(TransformerArchitectureConfig.model_validate_json(json.dumps({**SIZES, **TOLD, **KINDS[kind]})), 3).fill().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.3, generator=generator))
    return made


def said(made: Transformer, prompts: list[list[int]], how: How = GREEDY, **options: Any) -> list[list[int | None]]:
    return [list(column) for column in zip(*generate.generate(made, prompts, how, most=options.pop("most", 20), **options), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_nothing_nor_do_others_beside_one(kind: str) -> None:
    made = model(kind)
    together = said(made, PROMPTS)
    assert together == said(made, PROMPTS, cache=False)
    assert together == [said(made, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert len({token for tokens in together for token in tokens}) > 4


def test_what_the_cache_gives_are_the_logits() -> None:
    made, plain = model("windows, shared keys"), model("windows, shared keys")
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), cached(made, 48) as seen:
        for end in (7, 8, 9, 30, 31, 48):
            torch.testing.assert_close(made.last(tokens[:, :end]), plain(tokens[:, :end])[:, -1], rtol=1e-5, atol=1e-5)
            seen.count = end


def test_no_sequence_gets_longer_than_the_model_was_made_for() -> None:
    made = model("learned positions")
    assert len(said(made, [list(range(40))], most=100)[0]) == 8
    long, short = said(made, [list(range(40)), [1]], most=100)
    assert [token for token in long if token is not None] == said(made, [list(range(40))], most=100)[0]
    assert short == said(made, [[1]], most=100)[0]
    assert len(short) == 47


def test_ends() -> None:
    made = model("usual")
    first, second, third = said(made, PROMPTS)
    end = first[4]
    ended = said(made, PROMPTS, ends={end})
    assert ended[0] == [*first[: first.index(end)], *[None] * (len(ended[0]) - first.index(end))]
    for tokens, whole in zip(ended[1:], (second, third), strict=True):
        kept = [token for token in tokens if token is not None]
        assert kept == whole[: len(kept)]
        assert end not in kept
    stopped = said(made, PROMPTS, done=lambda number: number != 1)
    assert [[token is None for token in tokens[:2]] for tokens in stopped] == [[False, True], [False, False], [False, True]]


def test_drawn_as_likely_as_they_are() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])
    generator = torch.Generator().manual_seed(1)

    def shares(how: How) -> torch.Tensor:
        drawn = torch.tensor([generate._drawn(logits, how, generator) for _ in range(4000)])
        return torch.bincount(drawn, minlength=5) / 4000

    torch.testing.assert_close(shares(How(2.0)), (logits / 2).softmax(0), rtol=0, atol=0.03)
    chances = logits.softmax(0)
    two = torch.tensor([0.0, chances[1], chances[2], 0, 0]) / (chances[1] + chances[2])
    torch.testing.assert_close(shares(How(1.0, top_k=2)), two, rtol=0, atol=0.03)
    assert chances[1] < 0.6 < chances[1] + chances[2]
    torch.testing.assert_close(shares(How(1.0, top_p=0.6)), two, rtol=0, atol=0.03)
    assert shares(How(1.0, top_p=0.0))[1] == 1


def test_the_same_seed_says_the_same() -> None:
    made = model("usual")
    one, other = said(made, PROMPTS, How(1.0, seed=1)), said(made, PROMPTS, How(1.0, seed=2))
    assert one == said(made, PROMPTS, How(1.0, seed=1))
    assert one != other
    assert one[0] == said(made, PROMPTS[:1], How(1.0, seed=1))[0]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab€🙂\n", max_size=30), st.lists(st.text(alphabet="ab€\n", min_size=1, max_size=4), max_size=2))
def test_text_comes_whole_and_ends_before_what_ends_it(text: str, stops: list[str]) -> None:
    stream, told = Stream(Bytes(), stops), []
    for token in text.encode():
        if not stream.stopped:
            told.append(stream.add(token))
    first = next((text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), None)
    wanted = text if first is None else first[: min(first.find(stop) for stop in stops if stop in first)]
    assert all("\ufffd" not in piece for piece in told)
    assert "".join([*told, stream.end()]) == wanted == stream.text


@pytest.fixture(scope="module")
def trained(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    own = changed(config, trainer={"train_iterations": 6}, transformer_architecture=GATED)
    train(folder, own)
    return folder, own


def asked(place: Path, *prompts: str, **options: Any) -> dict[str, Any]:
    usual = {"most": 20, "temperature": 0, "top_k": 0, "top_p": 1.0, "stop": [], "seed": None, "tokenizer": "bytes", "json": True}
    return {"source": str(place), "base": None, "prompts": list(prompts), **usual, **options}


def measured(config: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    usual = {"tasks": [], "shots": None, "limit": None, "task_files": None, "batch": 3, "tokenizer": "bytes", "json": True}
    return {"config": json.dumps(config), "model": str(folder / "run"), **usual, **options}


def sampled(folder: Path, question: dict[str, Any], size: int) -> dict[str, Any]:
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps(question))
    world = World(folder, {}, size, script="sampling")
    assert world.wait() == [0] * size, world.log()
    answer: dict[str, Any] = json.loads((folder / "rank-0.log").read_text().splitlines()[-1])
    return answer


def test_ranks_that_share_a_model_say_the_same(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = trained[0] / "run"
    one = sampled(tmp_path / "one", asked(run, "01", "0123456"), 1)
    assert (one["step"], [row["tokens"] for row in one["samples"]]) == (6, [20, 20])
    assert sampled(tmp_path / "two", asked(run, "01", "0123456"), 2) == one
    export(run, tmp_path / "out", dtype=None, shard_bytes=2**30)
    there = sampled(tmp_path / "there", asked(tmp_path / "out", "01", "0123456"), 1)
    assert there["samples"] == one["samples"]


def test_what_cannot_be_used_is_refused(trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        source.opened(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        source.opened(tmp_path)
    found = source.opened(trained[0] / "run")
    assert found.tokenizers == ("bytes",)
    with pytest.raises(TrainingError, match="has 256 tokens, and the model has 64"):
        replace(found, shape=found.shape.model_copy(update={"vocab_size": 64})).encoder(None)
    other = changed(trained[1], transformer_architecture={**GATED, "num_layers": 3})
    assert evaluate.main(measured(other, trained[0])) == EXIT_ERROR
    assert "num_layers is 2 there and 3 here" in capsys.readouterr().err
    beside = changed(trained[1], transformer_architecture={"lora_config": {}})
    assert evaluate.main(measured(beside, trained[0])) == EXIT_ERROR
    assert "lora_config is None there" in capsys.readouterr().err
    broken = model("usual")
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="is no number"):
        said(broken, PROMPTS)


@pytest.mark.usefixtures("_alone")
def test_what_it_is_worth_is_what_training_said(trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = trained
    assert evaluate.main(measured(config, folder)) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["step"] == 6
    assert round(told["loss"], 4) == round(held_out(folder)[6], 4)
    assert told["samples"] == 24


SAYS = {"prompts": ["01", "0123456"], "interval": 4, "max_tokens": 12, "temperature": 0, "tokenizer": "bytes"}


def samples(folder: Path) -> dict[int, list[dict[str, str]]]:
    read = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["generated"]) for line in read if "generated" in line]
    assert len(dict(found)) == len(found), "each once"
    return dict(found)


@pytest.mark.test_all_only("generates during training in six topologies; the gate generates from a trained model")
@pytest.mark.parametrize(
    ("topology", "trainer", "size"),
    [
        ({}, {}, 1),
        ({}, {}, 2),
        ({"model_parallel_size": 2}, {}, 2),
        ({"data_parallel_type": "fsdp"}, {}, 2),
        ({"model_parallel_size": 2, "data_parallel_type": "fsdp"}, {}, 4),
        ({}, {"compile": True}, 1),
    ],
)
def test_it_speaks_while_it_is_trained(
    trained: tuple[Path, dict[str, Any]], topology: dict[str, Any], trainer: dict[str, Any], size: int, tmp_path: Path
) -> None:
    wanted = sampled(tmp_path / "later", asked(trained[0] / "run", *SAYS["prompts"], most=12), 1)["samples"]
    train(tmp_path, changed(trained[1], topology=topology, trainer={**trainer, "sampling_config": SAYS}), size)
    assert losses(tmp_path) == (pytest.approx(losses(trained[0]), rel=1e-6) if topology or trainer else losses(trained[0]))
    said = samples(tmp_path)
    assert sorted(said) == [4, 6]
    assert said[6] == [{"prompt": row["prompt"], "text": row["text"]} for row in wanted]


def test_what_it_says_goes_everywhere(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = {"use_csv": True, "use_tensorboard": True, "use_wandb": True, "wandb_offline": True}
    own = changed(trained[1], trainer={"sampling_config": {**SAYS, "prompts": ["01\n2"]}}, logger=logger)
    train(tmp_path, changed(own, trainer={"train_iterations": 4}))
    train(tmp_path, own)
    said = samples(tmp_path)
    assert sorted(said) == [4, 6]
    log = (tmp_path / "rank-0.log").read_text()
    assert "step 6/6  says: 01\\n2" in log
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert read.Tags()["tensors"] == ["samples/0"]
    texts = {point.step: point.tensor_proto.string_val[0].decode() for point in read.Tensors("samples/0")}
    assert sorted(texts) == [4, 6]
    assert texts[6].startswith("    01\n    2")
    tables = list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/*.json"))
    assert [json.loads(path.read_text())["columns"] for path in tables] == [["prompt", "text"]] * len(tables)
    assert len(tables) >= 2
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert {int(row["step"]): json.loads(row["generated"]) for row in csv.DictReader(file) if row["generated"]} == said


def test_what_cannot_be_said_is_refused(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for number, (says, why) in enumerate(
        [({"tokenizer": "none.json"}, "none.json"), ({"prompts": ["x" * 40]}, "has 40 tokens"), ({"prompts": [""]}, "holds nothing")]
    ):
        with pytest.raises(AssertionError, match=why):
            train(tmp_path / str(number), changed(trained[1], trainer={"sampling_config": {**SAYS, **says}}))
    with pytest.raises(ValidationError, match="pipe_parallel_size"):
        Config.from_json(json.dumps(changed(trained[1], topology={"pipe_parallel_size": 2}, trainer={"sampling_config": SAYS})))
