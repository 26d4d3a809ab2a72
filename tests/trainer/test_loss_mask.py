"""Loss masks: built from prompts and conversations, stored in a sidecar of the token file, and applied by samples and training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenize_helpers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenize_helpers import read_contents, read_documents, write_lines
from worlds import merge_config, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.data import Packing
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.tokenize import pipeline
from swarmtrain.trainer.tokenize.sample_inspection import describe_samples
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions
from swarmtrain.trainer.tokenize.verification import verify_token_files

SHAPE = TransformerArchitectureConfig(sequence_length=4, vocab_size=1 << 16)
# Only the chat template may write its control tokens; Hypothesis also draws the string constants of the code under test.
text = some.text(some.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda said: "<|im_" not in said)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenize_helpers.write_tokenizer(path)
    return path


def write_masked(prefix: Path, documents: Sequence[Sequence[int]], mask: Sequence[int], dtype: str = "uint16") -> None:
    memory_map.write_token_files(prefix, [np.array(document) for document in documents], dtype, {"loss_mask": True})
    prefix.with_suffix(".mask.bin").write_bytes(bytes(mask))


def read_masks(prefix: Path) -> list[list[int]]:
    file = MemoryMap(prefix)
    assert file.loss_mask is not None
    return [file.loss_mask[start : start + count].tolist() for start, count in file.documents.tolist()]


@given(lengths=some.lists(some.integers(1, 11), min_size=2, max_size=20), packing=some.sampled_from(list(Packing)), data=some.data())
@settings(max_examples=40, deadline=None)
def test_samples_select_the_loss_tokens(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], packing: Packing, data: some.DataObject
) -> None:
    """Each token has a unique value, so that pairs of input and target can be distinguished."""
    folder = tmp_path_factory.mktemp("mask")
    lengths = [*lengths, 2]
    documents = [list(range(first, end)) for first, end in pairwise([0, *np.cumsum(lengths).tolist()])]
    mask = data.draw(some.lists(some.integers(0, 1), min_size=sum(lengths), max_size=sum(lengths)))
    write_masked(folder / "a", documents, mask)
    pairs = list(pairwise(range(sum(lengths)))) if packing is Packing.stream else [pair for each in documents for pair in pairwise(each)]
    wanted = [pair for pair in pairs if mask[pair[1]]]
    for use_mmap in (True, False):
        samples = TokenDataset([folder / "a"], SHAPE, 0, packing=packing, use_mmap=use_mmap)
        batch = samples.build_batch(0, len(samples))
        samples.prefetch_samples(batch.ids)
        rows = samples.load_samples(batch.ids)
        there = rows.targets >= 0
        assert sorted(zip(rows.inputs[there].tolist(), rows.targets[there].tolist(), strict=True)) == wanted
        assert batch.loss_tokens == len(wanted)
        assert sum(samples.count_loss_tokens(np.array([sample])) for sample in range(len(samples))) == len(wanted)


def test_another_mask_is_other_data(tmp_path: Path) -> None:
    memory_map.write_token_files(tmp_path / "none", [np.arange(9)], "uint16")
    write_masked(tmp_path / "one", [range(9)], [1] * 9)
    write_masked(tmp_path / "other", [range(9)], [0, *[1] * 8])
    assert len({TokenDataset([tmp_path / name], SHAPE, 0).fingerprint for name in ("none", "one", "other")}) == 3


def test_corrupt_masks(tmp_path: Path) -> None:
    write_masked(tmp_path / "a", [range(9)], [1] * 8)
    with pytest.raises(TrainingError, match=r"a\.mask\.bin has 8 bytes for 9 tokens"):
        MemoryMap(tmp_path / "a")
    (tmp_path / "a.mask.bin").unlink()
    with pytest.raises(TrainingError, match=r"a\.mask\.bin: no such file"):
        MemoryMap(tmp_path / "a")
    write_masked(tmp_path / "a", [range(9)], [1] * 8 + [2])
    with pytest.raises(TrainingError, match=r"a\.mask\.bin has the value 2, but only 0 and 1"):
        verify_token_files(tmp_path / "a")


def test_training_is_the_same_in_every_world(tmp_path: Path, config: dict[str, Any]) -> None:
    """Some ranks, and some whole steps, have no loss tokens. A mask that selects every token changes nothing."""
    tokens = MemoryMap(Path(config["data"]["data_prefixes"][0])).tokens[0:4000].astype(int)
    write_masked(tmp_path / "some", [tokens], [1] * 100 + [0] * 3900, "uint8")
    write_masked(tmp_path / "all", [tokens], [1] * 4000, "uint8")
    memory_map.write_token_files(tmp_path / "none", [tokens], "uint8")

    def losses(name: str, size: int = 1) -> dict[int, float]:
        data = {"data_prefixes": [str(tmp_path / name)], "validation_data_prefixes": []}
        return run_training(tmp_path / f"{name}-{size}", merge_config(config, data=data), size)

    one = losses("some")
    assert losses("some", 2) == pytest.approx(one, abs=1e-5)
    assert {loss > 0 for loss in one.values()} == {True, False}
    assert losses("all") == losses("none")


@pytest.mark.test_all_only("starts a command for each format; the gate has conversations")
@given(
    pairs=some.lists(some.tuples(text, text.filter(bool)), min_size=1, max_size=12),
    end=some.booleans(),
    own=some.booleans(),
    size=some.integers(1, 300),
)
@settings(max_examples=20, deadline=None)
def test_prompts_and_completions(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, pairs: list[tuple[str, str]], *, end: bool, own: bool, size: int
) -> None:
    """Compared with one pair and one character at a time: a token is a loss token if it has a character of the completion."""
    folder = tmp_path_factory.mktemp("pairs")
    name = write_lines(folder / "a.jsonl", [{"p": prompt, "c": completion} for prompt, completion in pairs])
    asked = TokenizeOptions(
        f"{folder}/t", str(tokenizer) if own else "bytes", prompt_key="p", completion_key="c", append_eos=end, workers=2
    )
    meta = pipeline.tokenize_source_files(asked, [name], min_shard_bytes=size)
    expected, masks = [], []
    for prompt, completion in pairs:
        tokens, mask = _tokenize_by_hand(tokenizer if own else None, prompt + completion, range(len(prompt), len(prompt + completion)))
        begin, last = [0] if own and tokens[0] != 0 else [], [0 if own else 256] if end else []
        last = [] if tokens[-1:] == last else last
        expected.append([*begin, *tokens, *last])
        masks.append([*(0 for _ in begin), *mask, *(1 for _ in last)])
    assert read_documents(folder / "t") == expected
    assert read_masks(folder / "t") == masks
    assert meta["loss_tokens"] == sum(map(sum, masks))
    pipeline.tokenize_source_files(replace(asked, prefix=f"{folder}/u", workers=1), [name])
    assert read_contents(folder / "t") == read_contents(folder / "u")
    assert (folder / "t.mask.bin").read_bytes() == (folder / "u.mask.bin").read_bytes()
    assert "count in the loss; hashes of t.bin t.mask.bin t.idx as recorded" in str(verify_token_files(folder / "t"))


def _tokenize_by_hand(tokenizer: Path | None, chat_text: str, completion_positions: Sequence[int]) -> tuple[list[int], list[int]]:
    if tokenizer is None:
        pieces = [(character.encode(), int(place in completion_positions)) for place, character in enumerate(chat_text)]
        return [byte for part, _ in pieces for byte in part], [counted for part, counted in pieces for _ in part]
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    encoding = library.encode(chat_text, add_special_tokens=False)
    return encoding.ids, [int(any(place in completion_positions for place in range(*offsets))) for offsets in encoding.offsets]


turn = some.tuples(text, some.lists(text, max_size=1), text.map(lambda said: said or "x"))


@given(
    chats=some.lists(some.tuples(some.none() | text, some.lists(turn, min_size=1, max_size=3)), min_size=1, max_size=6),
    own=some.booleans(),
    size=some.integers(1, 400),
)
@settings(max_examples=20, deadline=None)
def test_conversations(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, chats: list[Any], *, own: bool, size: int) -> None:
    """ChatML, written by hand: loss tokens are the assistant's text and the token that ends it, not the newline after that."""
    folder = tmp_path_factory.mktemp("chats")
    records, expected, masks = [], [], []
    for system, turns in chats:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for asked, results, answered in turns:
            messages += [{"role": "user", "content": asked}]
            for result in results:
                messages += [{"role": "assistant", "content": "look"}, {"role": "tool", "content": result}]
            messages += [{"role": "assistant", "content": answered}]
        records.append({"messages": messages})
        whole, said = "", list[int]()
        for message in messages:
            whole += f"<|im_start|>{message['role']}\n"
            until = f"{message['content']}<|im_end|>"
            if message["role"] == "assistant":
                said += range(len(whole), len(whole + until))
            whole += f"{until}\n"
        tokens, mask = _tokenize_by_hand(tokenizer if own else None, whole, said)
        expected.append(tokens)
        masks.append(mask)
    name = write_lines(folder / "a.jsonl", records)
    asked_for = TokenizeOptions(f"{folder}/t", str(tokenizer) if own else "bytes", chat=True, workers=2)
    pipeline.tokenize_source_files(asked_for, [name], min_shard_bytes=size)
    assert read_documents(folder / "t") == expected
    assert read_masks(folder / "t") == masks


def build_chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{role} says"} for role in roles]}


INVALID_CHATS = {
    "no answer": (build_chat("system", "user"), "has no message of the role assistant that is trained"),
    "nothing": ({"messages": []}, "has no list of messages"),
    "a text": ({"messages": "hello"}, "has no list of messages"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 has neither a text as content nor tool_calls"),
    "another layout": ({"dialog": []}, "has no list of messages under messages or conversations; its keys: 'dialog'"),
    "special": (
        {"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]},
        "message 1 has <|im_end|>, which only the template may write",
    ),
    "a weight": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]},
        "message 2 has weight 0.5, and only 0 and 1 are supported",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "b"}]},
        "message 1 has a part of type image, and only text can be trained",
    ),
    "tools": (
        {"tools": [{"name": "f"}], "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "has tools, which the chat template does not write",
    ),
    "a call": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "find"}}]}]},
        "message 2 calls find, which the chat template does not write",
    ),
    "another speaker": (
        {"conversations": [{"from": "narrator", "value": "a"}]},
        "message 1 is from 'narrator', which is not one of human,",
    ),
}


@pytest.mark.parametrize("name", INVALID_CHATS)
def test_invalid_conversations(tmp_path: Path, tokenizer: Path, name: str) -> None:
    record, said = INVALID_CHATS[name]
    path = write_lines(tmp_path / "a.jsonl", [build_chat("user", "assistant"), record])
    for encoder in ("bytes", str(tokenizer)):
        with pytest.raises(TrainingError) as error:
            pipeline.tokenize_source_files(TokenizeOptions(f"{tmp_path}/t", encoder, chat=True, workers=1), [path])
        assert f"a.jsonl line 2: {said}" in error.value.message


def test_templates(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer's template, a template file, and templates that do not show where an answer is."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    settings_of = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_of))
    path = write_lines(tmp_path / "a.jsonl", [build_chat("user", "assistant", "user", "assistant")])
    asked = TokenizeOptions(f"{tmp_path}/t", f"{tmp_path}/tokenizer.json", chat=True, workers=1)
    pipeline.tokenize_source_files(asked, [path])
    assert "chat template: tokenizer_config.json" in capsys.readouterr().err
    assert json.loads((tmp_path / "t.meta.json").read_text())["stop_tokens"] == [1]
    config = {"transformer_architecture": {"sequence_length": 200, "vocab_size": 500}, "data": {"data_prefixes": [f"{tmp_path}/t"]}}
    (shown,) = describe_samples(Config.from_json(json.dumps(config)), 1)
    runs = [(line.split()[0], json.loads(line.split(": ", 1)[1])) for line in str(shown).splitlines()[1:]]
    assert runs == [
        ("no", "<|endoftext|>[user says]A:"),
        ("loss", "assistant says<|im_end|>"),
        ("no", "[user says]A:"),
        ("loss", "assistant says<|im_end|>"),
    ]
    for source, said in {
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}": "writes the messages before it differently",
        "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}": "content of message 2, of the role assistant, is omitted",
        "{{ raise_exception('only weather') }}": "the chat template: only weather",
        "{{ messages[0].a.b }}": "the chat template: ",
        "{% for %}": "is not a valid template",
    }.items():
        (tmp_path / "own.jinja").write_text(source)
        with pytest.raises(TrainingError, match=said):
            pipeline.tokenize_source_files(replace(asked, chat_template=f"{tmp_path}/own.jinja"), [path])


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{}])
    plain = TokenizeOptions(f"{tmp_path}/t", "bytes", workers=1)
    for changes, said in (
        ({"prompt_key": "p"}, "must be used together"),
        ({"prompt_key": "p", "completion_key": "c", "key": "text"}, "without --key"),
        ({"chat": True, "append_eos": True}, "the template writes all special tokens"),
        ({"chat": True, "split_special_tokens": True}, "the template writes all special tokens"),
        ({"chat_template": "a.jinja"}, "needs --chat"),
        ({"chat": True, "chat_template": f"{tmp_path}/none.jinja"}, "has no chat template"),
    ):
        with pytest.raises(TrainingError, match=said):
            pipeline.tokenize_source_files(replace(plain, **changes), [path])  # type: ignore[arg-type]
