"""Published chat templates are rendered as transformers renders them, and the loss mask has what the model must write itself.

The templates are those in TRL's package. For many of them it also has a version with {% generation %} marks, for which transformers
computes the mask.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
import transformers

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize import chat_template, tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.conversations import Conversation, read_conversation

TRL = importlib.util.find_spec("trl")
assert TRL is not None
assert TRL.submodule_search_locations
FOLDER = Path(TRL.submodule_search_locations[0]) / "chat_templates"
# What reads a content only as a list of parts, for pictures.
MULTIMODAL = ("idefics3", "llava_next", "smolvlm")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.startswith(MULTIMODAL))
MARKED = [name for name in NAMES if name.endswith("_training") and name not in ("gptoss_training", "muse_glimmer_training")]
CONTROL = re.compile(r"<[|｜][^<>'\"{}]*?[|｜]>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?[A-Z_]+\]")
CALL = [{"id": "callabc12", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}}]
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": {**WEATHER, "description": "the weather"}}]


def say(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


RESULT = say("tool", "sunny", tool_call_id="callabc12", name="get_weather")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [say("user", "q one"), say("assistant", "a one")]},
    "two turns": {"messages": [say("user", "q one"), say("assistant", "a one"), say("user", "q two"), say("assistant", "a two")]},
    "system": {"messages": [say("system", "be brief"), say("user", "q one"), say("assistant", "a one")]},
    "spaces": {"messages": [say("user", " q one\n"), say("assistant", "\n a one \n"), say("user", "q"), say("assistant", "é 漢.")]},
    "ends with the user": {"messages": [say("user", "q one"), say("assistant", "a one"), say("user", "q two")]},
    "begins with the assistant": {"messages": [say("assistant", "hello"), say("user", "q one"), say("assistant", "a one")]},
    "one role twice": {"messages": [say("user", "q one"), say("user", "q two"), say("assistant", "a one"), say("assistant", "a two")]},
    "developer": {"messages": [say("developer", "be brief"), say("user", "q one"), say("assistant", "a one")]},
    "a block of thoughts": {
        "messages": [
            say("user", "q one"),
            say("assistant", "<think>\nwhy\n</think>\n\na one"),
            say("user", "q two"),
            say("assistant", "<think>\nhm\n</think>\n\na two"),
        ]
    },
    "thoughts": {
        "messages": [
            say("user", "q one"),
            say("assistant", "a one", reasoning_content="why"),
            say("user", "q two"),
            say("assistant", "a two", reasoning_content="so"),
        ]
    },
    "a call": {"tools": TOOLS, "messages": [say("user", "q"), say("assistant", "", tool_calls=CALL), RESULT, say("assistant", "sunny!")]},
    "a call without content": {
        "tools": TOOLS,
        "messages": [say("user", "q"), say("assistant", None, tool_calls=CALL), RESULT, say("assistant", "sunny!")],
    },
    "a call with content": {
        "tools": TOOLS,
        "messages": [
            say("user", "q"),
            say("assistant", "I look", tool_calls=CALL),
            RESULT,
            say("assistant", "sunny!"),
            say("user", "thanks"),
        ],
    },
    "arguments as a text": {
        "messages": [
            say("user", "q"),
            say("assistant", "", tool_calls=[{**CALL[0], "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]),
            RESULT,
            say("assistant", "sunny!"),
        ],
    },
    "tools that are not called": {"tools": TOOLS, "messages": [say("user", "q one"), say("assistant", "a one")]},
    "no thinking": {
        "messages": [say("user", "q one"), say("assistant", "a one")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "eight turns": {"messages": [say("assistant" if number % 2 else "user", f"text {number}") for number in range(8)]},
    "parts": {"messages": [say("user", [{"type": "text", "text": "q one"}]), say("assistant", [{"type": "text", "text": "a one"}])]},
}


def write_folder(folder: Path, source: str) -> Path:
    """Write a byte-level tokenizer that has the control tokens of a template."""
    controls = sorted({"<bos>", "<eos>", *CONTROL.findall(source)})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=controls, initial_alphabet=alphabet, vocab_size=0, show_progress=False)
    tokenizer.train_from_iterator(["x"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def render(template: ChatTemplate, record: dict[str, Any]) -> tuple[str, list[str]] | str:
    """Return the text of a record and the texts of the loss tokens; or why it is refused."""
    try:
        text, ranges = template.render_conversation(read_conversation(record, []))
    except ValueError as error:
        return str(error)
    return text, [text[start:end] for start, end in ranges]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_rendered_as_transformers_does_or_refused(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, (FOLDER / f"{name}.jinja").read_text())
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(tokenizer_backends.open_tokenizer(str(tmp_path)), None)
    refused = {}
    for kind, record in CONVERSATIONS.items():
        result = render(template, record)
        if isinstance(result, str):
            refused[kind] = result
            continue
        text, turns = result
        messages, others = record["messages"], {"tools": record.get("tools"), "tokenize": False, **record.get("chat_template_kwargs", {})}
        try:
            expected = reference.apply_chat_template(messages, **others)
        except (TypeError, jinja2.TemplateError):
            expected = ""
        if kind == "parts" and ("q one" not in expected or repr(messages[0]["content"]) in expected):  # it cannot write parts
            expected = reference.apply_chat_template(CONVERSATIONS["one turn"]["messages"], **others)
        assert text == expected, kind
        # The model writes each answer, and not what it is asked.
        answers = [message for message in record["messages"] if message["role"] == "assistant"]
        assert len(turns) >= len(answers), kind
        assert all("q one" not in turn and "q two" not in turn and "be brief" not in turn for turn in turns), (kind, turns)
        for answer in answers:
            said = answer["content"] if isinstance(answer["content"], str) else "get_weather" if answer["content"] is None else "a one"
            assert said.split("</think>")[-1].strip() in "".join(turns), (kind, turns)
    assert len(refused) <= 9, refused
    assert not {"one turn", "two turns", "spaces", "a block of thoughts", "thoughts", "no thinking", "eight turns"} & set(refused), refused


@pytest.mark.parametrize("name", MARKED)
def test_the_mask_of_a_template_with_marks_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, (FOLDER / f"{name}.jinja").read_text())
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = tokenizer_backends.open_tokenizer(str(tmp_path))
    template = ChatTemplate(tokenizer, None)
    compared = 0
    for kind, record in CONVERSATIONS.items():
        try:
            text, ranges = template.render_conversation(read_conversation(record, []))
        except ValueError:
            continue
        if kind == "parts":
            continue
        expected = reference.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **record.get("chat_template_kwargs", {}),
        )
        [encoded] = tokenizer.encode([text])
        assert encoded.tokens.tolist() == expected["input_ids"], kind
        assert chat_template.build_loss_mask(encoded, ranges).astype(int).tolist() == expected["assistant_masks"], kind
        compared += 1
    assert compared >= 8


# Written by hand, from the models' documentation: what is generated after the prompt, with the token that ends the turn.
TURNS = {
    "qwen3": {
        "two turns": ["a one<|im_end|>", "<think>\n\n</think>\n\na two<|im_end|>"],
        "a block of thoughts": ["a one<|im_end|>", "<think>\nhm\n</think>\n\na two<|im_end|>"],
        "thoughts": ["a one<|im_end|>", "<think>\nso\n</think>\n\na two<|im_end|>"],
    },
    "qwen3_5_think": {
        "two turns": ["a one<|im_end|>", "\n</think>\n\na two<|im_end|>"],
        "thoughts": ["a one<|im_end|>", "so\n</think>\n\na two<|im_end|>"],
    },
    "deepseek_r1_distill": {
        "two turns": ["a one<｜end▁of▁sentence｜>", "a two<｜end▁of▁sentence｜>"],
        "a block of thoughts": ["\n\na one<｜end▁of▁sentence｜>", "\n\na two<｜end▁of▁sentence｜>"],
    },
    "phi3": {"two turns": ["a one<|end|>", "a two<|end|>\n<eos>"], "ends with the user": ["a one<|end|>"]},
    "nemotron_3_nano": {"two turns": ["<think></think>a one<|im_end|>", "<think></think>a two<|im_end|>"]},
    "gptoss": {
        "two turns": ["<|channel|>final<|message|>a one<|end|>", "<|channel|>final<|message|>a two<|return|>"],
        "a call": [
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>',
            "<|channel|>final<|message|>sunny!<|return|>",
        ],
    },
    "glm4moe": {"two turns": ["\n<think></think>\na one<|user|>", "\n<think></think>\na two"]},
    "llama3_1": {
        "a call": ['{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}<|eot_id|>', "sunny!<|eot_id|>"],
        "begins with the assistant": ["hello<|eot_id|>", "a one<|eot_id|>"],
    },
    "gemma": {"two turns": ["a one<end_of_turn>", "a two<end_of_turn>"]},
}


@pytest.mark.parametrize("name", TURNS)
def test_the_turns_of_a_template_without_marks(tmp_path: Path, name: str) -> None:
    template = ChatTemplate(tokenizer_backends.open_tokenizer(str(write_folder(tmp_path, (FOLDER / f"{name}.jinja").read_text()))), None)
    for kind, expected in TURNS[name].items():
        result = render(template, CONVERSATIONS[kind])
        assert not isinstance(result, str), result
        assert result[1] == expected, kind
    assert template.end_of_turn_tokens


def test_messages_that_are_not_trained(tmp_path: Path) -> None:
    """By `weight` or `train`, with a template that marks what is generated, and with one that does not."""
    messages = CONVERSATIONS["two turns"]["messages"]
    for name, ending in (("qwen3", ""), ("qwen3_training", "\n")):
        folder = tmp_path / name
        folder.mkdir()
        template = ChatTemplate(tokenizer_backends.open_tokenizer(str(write_folder(folder, (FOLDER / f"{name}.jinja").read_text()))), None)
        for skip in ({"weight": 0}, {"train": False}):
            changed = [*messages[:1], {**messages[1], **skip}, *messages[2:]]
            result = render(template, {"messages": changed})
            assert not isinstance(result, str), result
            assert result[1] == [f"<think>\n\n</think>\n\na two<|im_end|>{ending}"]
            all_skipped = [{**message, **skip} for message in messages]
            assert render(template, {"messages": all_skipped}) == "has no message of the role assistant that is trained"


LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "ShareGPT": ([], {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    "Alpaca": ([], {"instruction": "q", "input": "", "output": "a"}),
    "as JSON": (["chat"], {"chat": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}),
    "prompt and completion": (["p", "c"], {"p": [{"role": "user", "content": "q"}], "c": [{"role": "assistant", "content": "a"}]}),
    "texts": (["p", "c"], {"p": "q", "c": "a"}),
    "columns of a table": ([], {"messages": [{"role": "user", "content": "q", "tool_calls": None}, say("assistant", "a")], "tools": None}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_conversations(name: str) -> None:
    keys, record = LAYOUTS[name]
    assert read_conversation(record, keys) == Conversation([say("user", "q"), say("assistant", "a")], [1])


def test_only_the_completion_of_a_pair_of_messages_is_trained_and_an_alpaca_record_has_its_history() -> None:
    prompt = [say("user", "q"), say("assistant", "a"), say("user", "q")]
    assert read_conversation({"p": prompt, "c": [say("assistant", "b")]}, ["p", "c"]).trained_messages == [3]
    record = {"system": "s", "history": [["q", "a"]], "instruction": "i", "input": "j", "output": "o"}
    messages = [say("system", "s"), say("user", "q"), say("assistant", "a"), say("user", "i\nj"), say("assistant", "o")]
    assert read_conversation(record, []).messages == messages


def test_a_template_cannot_leave_its_sandbox_or_run_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_RENDER_SECONDS", 0.5)
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    for source, message in {
        loop: "is not rendered by the chat template within 0.5 s",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
        "{{ messages.append(1) }}": "unsafe|not safely callable",
    }.items():
        (tmp_path / "own.jinja").write_text(source)
        template = ChatTemplate(tokenizer_backends.ByteTokenizer(), str(tmp_path / "own.jinja"))
        with pytest.raises(ValueError, match=message):
            template.render_conversation(read_conversation(CONVERSATIONS["one turn"], []))


def test_the_code_in_a_tokenizers_folder_is_not_run(tmp_path: Path) -> None:
    write_folder(tmp_path, "{{ messages }}")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    with pytest.raises(TrainingError, match="contains custom code"):
        tokenizer_backends.open_tokenizer(str(tmp_path))
    assert not (tmp_path / "run").exists()
