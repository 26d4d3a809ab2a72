"""Inference: generation does not depend on how it is computed, and evaluation gives what training logged."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenize_helpers import write_tokenizer
from worlds import LocalWorld, merge_config, read_losses, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import EXIT_ERROR, CheckpointError, TrainingError
from swarmtrain.trainer.export.checkpoint_export import export_checkpoint
from swarmtrain.trainer.inference import evaluation, generation, model_source, sample_command
from swarmtrain.trainer.inference.generation import SamplingParams, enable_kv_cache
from swarmtrain.trainer.inference.text_stream import TextStream, decode_continuation
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.tokenize.tokenizer_backends import ByteTokenizer, open_tokenizer

GREEDY = SamplingParams(temperature=0)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_attention_heads": 4, "sequence_length": 48}
DOCUMENT_MASKING = {"reset_attention_mask": True, "reset_position_ids": True}
MODEL_KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "windows, shared keys": {"num_local_attention_heads": 2, "local_attention_window_size": 5, "attention_num_kv_heads": 2},
    "learned positions": {"learned_positions": True, "relative_position_embedding_type": "none", "parallel_residual": True},
    "neighbours turn": {"relative_position_embedding_type": "rotary_complex", "key_query_norm": True, "weight_tying": False},
    "u-muP": {"umup": {"enable": True}, "weight_tying": False, "mlp_type": "swiglu", "norm_type": "rms"},
}
GATED = {"vocab_size": 256, "norm_type": "rms", "mlp_type": "swiglu"}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [30, 31, 32, 33, 34]]


def build_random_model(kind: str) -> Transformer:
    """Return a model whose completions differ for different prompts."""
    model = (
        Transformer(TransformerArchitectureConfig.model_validate_json(json.dumps({**SIZES, **DOCUMENT_MASKING, **MODEL_KINDS[kind]})), 3)
        .init_weights()
        .eval()
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.3, generator=generator))
    return model


def generate_completions(
    model: Transformer, prompts: list[list[int]], sampling_params: SamplingParams = GREEDY, **options: Any
) -> list[list[int | None]]:
    return [
        list(column)
        for column in zip(
            *generation.generate_tokens(model, prompts, sampling_params, max_tokens=options.pop("most", 20), **options), strict=True
        )
    ]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_generation_depends_on_neither_the_cache_nor_the_batch(kind: str) -> None:
    made = build_random_model(kind)
    together = generate_completions(made, PROMPTS)
    assert together == generate_completions(made, PROMPTS, use_cache=False)
    assert together == [generate_completions(made, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert len({token for tokens in together for token in tokens}) > 4


def test_the_cache_gives_the_logits() -> None:
    made, plain = build_random_model("windows, shared keys"), build_random_model("windows, shared keys")
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), enable_kv_cache(made, 48) as seen:
        for end in (7, 8, 9, 30, 31, 48):
            torch.testing.assert_close(made.compute_next_token_logits(tokens[:, :end]), plain(tokens[:, :end])[:, -1], rtol=1e-5, atol=1e-5)
            seen.cached_length = end


def test_no_sequence_gets_longer_than_the_model_was_made_for() -> None:
    made = build_random_model("learned positions")
    assert len(generate_completions(made, [list(range(40))], most=100)[0]) == 8
    long, short = generate_completions(made, [list(range(40)), [1]], most=100)
    assert [token for token in long if token is not None] == generate_completions(made, [list(range(40))], most=100)[0]
    assert short == generate_completions(made, [[1]], most=100)[0]
    assert len(short) == 47


def test_generation_stops_at_eos_tokens() -> None:
    made = build_random_model("usual")
    first, second, third = generate_completions(made, PROMPTS)
    end = first[4]
    ended = generate_completions(made, PROMPTS, eos_tokens={end})
    assert ended[0] == [*first[: first.index(end)], *[None] * (len(ended[0]) - first.index(end))]
    for tokens, whole in zip(ended[1:], (second, third), strict=True):
        kept = [token for token in tokens if token is not None]
        assert kept == whole[: len(kept)]
        assert end not in kept
    stopped = generate_completions(made, PROMPTS, is_done=lambda number: number != 1)
    assert [[token is None for token in tokens[:2]] for tokens in stopped] == [[False, True], [False, False], [False, True]]


def test_tokens_are_sampled_as_likely_as_they_are() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])
    generator = torch.Generator().manual_seed(1)

    def shares(sampling_params: SamplingParams) -> torch.Tensor:
        drawn = torch.tensor([generation._sample_token(logits, sampling_params, generator) for _ in range(4000)])
        return torch.bincount(drawn, minlength=5) / 4000

    torch.testing.assert_close(shares(SamplingParams(2.0)), (logits / 2).softmax(0), rtol=0, atol=0.03)
    chances = logits.softmax(0)
    two = torch.tensor([0.0, chances[1], chances[2], 0, 0]) / (chances[1] + chances[2])
    torch.testing.assert_close(shares(SamplingParams(1.0, top_k=2)), two, rtol=0, atol=0.03)
    assert chances[1] < 0.6 < chances[1] + chances[2]
    torch.testing.assert_close(shares(SamplingParams(1.0, top_p=0.6)), two, rtol=0, atol=0.03)
    assert shares(SamplingParams(1.0, top_p=0.0))[1] == 1


def test_the_same_seed_generates_the_same() -> None:
    made = build_random_model("usual")
    one, other = (
        generate_completions(made, PROMPTS, SamplingParams(1.0, seed=1)),
        generate_completions(made, PROMPTS, SamplingParams(1.0, seed=2)),
    )
    assert one == generate_completions(made, PROMPTS, SamplingParams(1.0, seed=1))
    assert one != other
    assert one[0] == generate_completions(made, PROMPTS[:1], SamplingParams(1.0, seed=1))[0]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab€🙂\n", max_size=30), st.lists(st.text(alphabet="ab€\n", min_size=1, max_size=4), max_size=2))
def test_text_is_streamed_in_whole_characters_and_ends_before_a_stop_string(text: str, stops: list[str]) -> None:
    stream, pieces = TextStream(ByteTokenizer(), list("a€".encode()), stops), []
    for token in text.encode():
        if not stream.stopped:
            pieces.append(stream.add_token(token))
    first = next((text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), None)
    wanted = text if first is None else first[: min(first.find(stop) for stop in stops if stop in first)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join([*pieces, stream.flush_text()]) == wanted == stream.text


def test_a_completion_keeps_the_space_that_a_sentencepiece_tokenizer_drops_at_the_beginning_of_a_text(tmp_path: Path) -> None:
    """As transformers decodes the prompt and the completion together. Llama 2's normalizer and decoder."""
    words = ["<unk>", "▁the", "▁run", "▁is", "▁done", "▁on", "▁each", "▁node", ".", "e", "d"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(str(tmp_path / "tokenizer.json"))
    prompt, completion = (list(map(words.index, tokens.split())) for tokens in ("▁the ▁run ▁is", "▁done ▁on ▁each ▁node ."))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    expected = reference.decode(prompt + completion).removeprefix(reference.decode(prompt))
    stream = TextStream(ours, prompt)
    assert "".join([*map(stream.add_token, completion), stream.flush_text()]) == expected == " done on each node."
    assert decode_continuation(ours, prompt, completion) == expected


def test_generation_ends_with_the_stop_tokens_of_data_and_base_model(config: dict[str, Any], tmp_path: Path) -> None:
    """As transformers reads the base model's EOS tokens: from generation_config.json, or else from config.json."""
    base = tmp_path / "base"
    base.mkdir()
    files = {"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [3, 4]}}
    for name, content in files.items():
        (base / name).write_text(json.dumps(content))
        assert model_source.read_generation_stop_tokens(base) == ({2} if name == "config.json" else {3, 4})
    assert transformers.GenerationConfig.from_pretrained(base).eos_token_id == [3, 4]
    metas = {"chat": {"stop_tokens": [7]}, "earlier": {"prepared": {"options": {"eos_token": 8}}}, "other": {"dtype": "uint8"}}
    for name, meta in metas.items():
        (tmp_path / f"{name}.meta.json").write_text(json.dumps(meta))
    data = {"data_prefixes": [str(tmp_path / name) for name in [*metas, "missing"]]}
    own = merge_config(config, data=data, trainer={"init_from": str(base)})
    assert model_source.read_stop_tokens(Config.from_json(json.dumps(own))) == {3, 4, 7, 8}


@pytest.mark.usefixtures("_single_process")
def test_prompts_of_a_hugging_face_model_have_the_tokens_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With BOS, as a text and as a message of a conversation."""
    write_tokenizer(tmp_path / "tokenizer.json")
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=400, max_position_embeddings=64, initializer_range=0.3, **sizes)
    )
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": "a line"}]
    prompts = {
        False: tokenizer("a line", return_tensors="pt"),
        True: tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True),
    }
    for chat, prompt in prompts.items():
        assert prompt["input_ids"][0, 0] == 0
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)[0]
        expected = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :]).removesuffix("<|im_end|>")
        sample_command.main(build_sample_arguments(tmp_path, "a line", max_tokens=12, tokenizer=None, chat=chat))
        assert json.loads(capsys.readouterr().out)["samples"][0]["text"] == expected


@pytest.fixture(scope="module")
def trained_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    training_config = merge_config(config, trainer={"train_iterations": 6}, transformer_architecture=GATED)
    run_training(folder, training_config)
    return folder, training_config


def build_sample_arguments(source_path: Path, *prompts: str, **options: Any) -> dict[str, Any]:
    defaults = {"max_tokens": 20, "temperature": 0, "top_k": 0, "top_p": 1.0, "stop": [], "seed": None, "tokenizer": "bytes"}
    return {"source": str(source_path), "base": None, "prompts": list(prompts), "chat": False, "json": True, **defaults, **options}


def build_evaluate_arguments(config: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    defaults = {"tasks": [], "num_fewshot": None, "limit": None, "task_files": None, "batch_size": 3, "tokenizer": "bytes", "json": True}
    return {"config": json.dumps(config), "model": str(folder / "run"), "apply_chat_template": False, **defaults, **options}


def run_sample(folder: Path, arguments: dict[str, Any], size: int) -> dict[str, Any]:
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps(arguments))
    world = LocalWorld(folder, {}, size, script="run_sample")
    assert world.wait() == [0] * size, world.read_log()
    answer: dict[str, Any] = json.loads((folder / "rank-0.log").read_text().splitlines()[-1])
    return answer


def test_tensor_parallel_ranks_generate_the_same(trained_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = trained_run[0] / "run"
    one = run_sample(tmp_path / "one", build_sample_arguments(run, "01", "0123456"), 1)
    assert (one["step"], [row["tokens"] for row in one["samples"]]) == (6, [20, 20])
    assert run_sample(tmp_path / "two", build_sample_arguments(run, "01", "0123456"), 2) == one
    export_checkpoint(run, tmp_path / "out", dtype=None, shard_bytes=2**30)
    there = run_sample(tmp_path / "there", build_sample_arguments(tmp_path / "out", "01", "0123456"), 1)
    assert there["samples"] == one["samples"]


def test_models_that_cannot_generate_are_refused(
    trained_run: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        model_source.open_model(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        model_source.open_model(tmp_path)
    found = model_source.open_model(trained_run[0] / "run")
    assert found.tokenizer_names == ("bytes",)
    with pytest.raises(TrainingError, match="has 256 tokens, but the vocabulary of the model has only 64"):
        replace(found, architecture=found.architecture.model_copy(update={"vocab_size": 64})).open_tokenizer(None)
    other = merge_config(trained_run[1], transformer_architecture={**GATED, "num_layers": 3})
    assert evaluation.main(build_evaluate_arguments(other, trained_run[0])) == EXIT_ERROR
    assert "num_layers is 2 in the checkpoint and 3 in the config" in capsys.readouterr().err
    beside = merge_config(trained_run[1], transformer_architecture={"lora_config": {}})
    assert evaluation.main(build_evaluate_arguments(beside, trained_run[0])) == EXIT_ERROR
    assert "lora_config is None in the checkpoint" in capsys.readouterr().err
    broken = build_random_model("usual")
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="outputs NaN or Inf"):
        generate_completions(broken, PROMPTS)


@pytest.mark.usefixtures("_single_process")
def test_evaluation_gives_what_training_logged(trained_run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = trained_run
    assert evaluation.main(build_evaluate_arguments(config, folder)) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["step"] == 6
    assert round(result["loss"], 4) == round(read_validation_losses(folder)[6], 4)
    assert result["samples"] == 24


SAMPLING_CONFIG = {"prompts": ["01", "0123456"], "interval": 4, "max_tokens": 12, "temperature": 0, "tokenizer": "bytes"}


def read_samples(folder: Path) -> dict[int, list[dict[str, str]]]:
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["generated"]) for line in records if "generated" in line]
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
def test_it_generates_during_training(
    trained_run: tuple[Path, dict[str, Any]], topology: dict[str, Any], trainer: dict[str, Any], size: int, tmp_path: Path
) -> None:
    wanted = run_sample(tmp_path / "later", build_sample_arguments(trained_run[0] / "run", *SAMPLING_CONFIG["prompts"], max_tokens=12), 1)[
        "samples"
    ]
    run_training(tmp_path, merge_config(trained_run[1], topology=topology, trainer={**trainer, "sampling_config": SAMPLING_CONFIG}), size)
    assert read_losses(tmp_path) == (
        pytest.approx(read_losses(trained_run[0]), rel=1e-6) if topology or trainer else read_losses(trained_run[0])
    )
    said = read_samples(tmp_path)
    assert sorted(said) == [4, 6]
    assert said[6] == [{"prompt": row["prompt"], "text": row["text"]} for row in wanted]


@pytest.mark.test_all_only("trains once more; the gate has samples and sinks, each by itself")
def test_generated_samples_reach_every_sink(trained_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = {"use_csv": True, "use_tensorboard": True, "use_wandb": True, "wandb_offline": True}
    own = merge_config(trained_run[1], trainer={"sampling_config": {**SAMPLING_CONFIG, "prompts": ["01\n2"]}}, logger=logger)
    run_training(tmp_path, merge_config(own, trainer={"train_iterations": 4}))
    run_training(tmp_path, own)
    said = read_samples(tmp_path)
    assert sorted(said) == [4, 6]
    log = (tmp_path / "rank-0.log").read_text()
    assert "step 6/6  sample: 01\\n2" in log
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


def test_what_cannot_be_generated_is_refused(trained_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for number, (says, why) in enumerate(
        [({"tokenizer": "none.json"}, "none.json"), ({"prompts": ["x" * 40]}, "has 40 tokens"), ({"prompts": [""]}, "is empty")]
    ):
        with pytest.raises(AssertionError, match=why):
            run_training(tmp_path / str(number), merge_config(trained_run[1], trainer={"sampling_config": {**SAMPLING_CONFIG, **says}}))
    with pytest.raises(ValidationError, match="pipe_parallel_size"):
        Config.from_json(
            json.dumps(merge_config(trained_run[1], topology={"pipe_parallel_size": 2}, trainer={"sampling_config": SAMPLING_CONFIG}))
        )
