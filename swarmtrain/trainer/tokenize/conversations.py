"""Read conversations from records, in the layouts that chat data is published in.

| layout | record |
|---|---|
| OpenAI, Hugging Face | `messages`: a list of `{"role": …, "content": …}`, with `tools` and `tool_calls` |
| ShareGPT | `conversations`: a list of `{"from": "human", "value": …}` |
| Alpaca | `instruction`, `input`, `output`, and also `system` and `history` |
| prompt and completion | two lists of messages, or texts |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MESSAGES_KEY, SHAREGPT_KEY = "messages", "conversations"
_ALPACA_KEYS = ("instruction", "output")
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    "system": "system",
    "developer": "developer",
}
_TRAINED_KEYS = ("weight", "train")
"""Keys of an assistant's message that say whether it is trained: OpenAI's, and axolotl's."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning of a message. As in transformers, a template finds it under the first two."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation, as a chat template gets it."""

    messages: Sequence[Message]
    trained_messages: Sequence[int]
    """Indices of the assistant's messages whose tokens contribute to the loss."""
    tools: Sequence[Any] | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as enable_thinking."""


def read_conversation(values: Mapping[str, Any], keys: Sequence[str]) -> Conversation:
    """Return the conversation in the record `values`.

    `keys`: the key of the messages, or the two keys of a prompt and its completion; empty: find the messages in any of the layouts.
    Raises ValueError, which says what is wrong.
    """
    if len(keys) == 2:
        prompt, completion = (_read_messages(values[key], role) for key, role in zip(keys, ("user", "assistant"), strict=True))
        messages, first_trained = [*prompt, *completion], len(prompt)
    else:
        messages, first_trained = _find_messages(values, keys), 0
    trained = [number for number, message in enumerate(messages) if number >= first_trained and _is_trained(number, message)]
    if not trained:
        raise ValueError("has no message of the role assistant that is trained")
    tools = _parse_json(values.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is not a list")
    template_values = _parse_json(values.get("chat_template_kwargs")) or {}
    if not isinstance(template_values, dict):
        raise ValueError("chat_template_kwargs is not an object")
    return Conversation(messages, trained, tools, template_values)


def _find_messages(values: Mapping[str, Any], keys: Sequence[str]) -> list[Message]:
    for key in keys or (MESSAGES_KEY, SHAREGPT_KEY):
        if values.get(key) is not None:
            return _read_messages(values[key])
    if not keys and all(isinstance(values.get(key), str) for key in _ALPACA_KEYS):
        return _read_alpaca_record(values)
    names = ", ".join(map(repr, values)) or "none"
    raise ValueError(f"has no list of messages under {' or '.join(keys or (MESSAGES_KEY, SHAREGPT_KEY))}; its keys: {names}")


def _read_alpaca_record(values: Mapping[str, Any]) -> list[Message]:
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    history = [
        {"role": role, "content": text}
        for turn in values.get("history") or ()
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    question = "\n".join(filter(None, (values["instruction"], values.get("input"))))
    return _read_messages([*system, *history, {"role": "user", "content": question}, {"role": "assistant", "content": values["output"]}])


def _read_messages(value: Any, role_of_text: str = "") -> list[Message]:
    """Return the messages in `value`: a list, also as JSON; or with `role_of_text`, also a text, which is one message of that role."""
    parsed = _parse_json(value)
    if isinstance(parsed, str) and role_of_text:
        parsed = [{"role": role_of_text, "content": parsed}]
    if not isinstance(parsed, list) or not parsed:
        raise ValueError("has no list of messages")
    return [_read_message(number, message) for number, message in enumerate(parsed, 1)]


def _read_message(number: int, message: Any) -> Message:
    """Return a message without the keys whose value is null, as transformers passes it to a template."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is not an object")
    if "role" not in message and {"from", "value"} <= set(message):
        role = _SHAREGPT_ROLES.get(str(message["from"]))
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise ValueError(f"message {number} is from {message['from']!r}, which is not one of {known}")
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": role, "content": message["value"], **others}
    message = {key: part for key, part in message.items() if part is not None}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"message {number} has a part of type {kind}, and only text can be trained")
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ValueError(f"message {number} has neither a text as content nor tool_calls")
    thoughts = next((message[key] for key in _REASONING_KEYS if key in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _is_trained(number: int, message: Message) -> bool:
    if message["role"] != "assistant":
        return False
    for key in _TRAINED_KEYS:
        value = message.get(key, True)
        if value not in (0, 1):  # True == 1
            raise ValueError(f"message {number + 1} has {key} {value!r}, and only 0 and 1 are supported")
        if not value:
            return False
    return True


def _parse_json(value: Any) -> Any:
    """Return the list or object that a text contains as JSON, as tables store them; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
