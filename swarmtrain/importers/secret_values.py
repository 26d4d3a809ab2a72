"""Secrets in imported files: they are neither copied to the config nor printed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarmtrain.errors import escape_control_characters
from swarmtrain.importers.shell.unresolved import show_text

_KEY_LIKE = (
    r"hf_[A-Za-z0-9]{4,}|sk-[A-Za-z0-9_-]{4,}|gh[pousr]_[A-Za-z0-9]{4,}|github_pat_\w{4,}|glpat-[\w-]{4,}|xox[abprs]-[\w-]{4,}"
    r"|AKIA[A-Z0-9]{8,}|wandb_v1_\w{4,}|nvapi-[\w-]{4,}"
)
_KEY_LIKE_PATTERN = re.compile(rf"(?<![A-Za-z0-9_])(?:{_KEY_LIKE})")
_NAME = r"[\w.-]*(?:key|token|secret|passw(?:or)?d)"
_REDACTIONS = (
    (re.compile(rf"(\b{_NAME}\"?\s*[=:]\s*[\"']?)[^\s\"',{{}}\[\]]+", re.IGNORECASE), r"\1…"),
    (re.compile(rf"(--?{_NAME}[ \t]+)(?!-)(?:'[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE), r"\1…"),
    (re.compile(r"(\blogin\b(?:\s+-\S+(?=\s+-))*\s+)(?!-)\S+", re.IGNORECASE), r"\1…"),
    (re.compile(r"(\blogin\b[^\n]*\s-(?:p|-password|-token|-key)[ =])\S+", re.IGNORECASE), r"\1…"),
    (re.compile(r"(://[^\s/@:]*:)[^\s/@]+(?=@)"), r"\1…"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1…"),
    (_KEY_LIKE_PATTERN, "…"),
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])"), "…"),
)
_CREDENTIAL_NAME_PATTERN = re.compile(
    r"(?:.*[._-])?(?:api|access|auth|hf|hub|huggingface|hugging_face|wandb|secret|private|openai|anthropic|aws|azure|gcp|comet|neptune|github|"
    r"gitlab|clearml|mlflow|bot|bearer|client|encryption|license|user|my)[._-]?(?:api[._-]?|access[._-]?|auth[._-]?)?(?:key|token)"
    r"|(?:.*[._-])?(?:password|passwd|secret)|token",
    re.IGNORECASE,
)
_NAME_PATTERN = re.compile(_NAME, re.IGNORECASE)
_RANDOM_PATTERN = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[A-Za-z0-9_+/=-]{16,}")
_SWITCH_VALUES = ("true", "false", "yes", "no", "none", "null", "0", "1", "")
_MIN_SECRET_LENGTH = 6
_MAX_MESSAGE_LENGTH = 1000


@dataclass(frozen=True)
class SecretArguments:
    """Arguments of a script without those that contain secrets, and the names of the latter."""

    remaining: tuple[str, ...]
    removed: tuple[str, ...]


def redact_secrets(text: str, secrets: Collection[str] = ()) -> str:
    """Return `text` with `secrets`, and everything that looks like a secret, replaced by an ellipsis."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "…")
    for pattern, replacement in _REDACTIONS:
        text = pattern.sub(replacement, text)
    return text


def format_for_message(text: str) -> str:
    """Return `text` for an error: in one line of printable characters, without secrets."""
    shown = " ".join(redact_secrets(escape_control_characters(text)).split())
    return shown if len(shown) <= _MAX_MESSAGE_LENGTH else f"{shown[:_MAX_MESSAGE_LENGTH]}…"


def is_secret_value(text: str, secrets: Collection[str] = ()) -> bool:
    """Return whether `text` contains one of `secrets`, or a key of a known service."""
    is_known = any(secret in text for secret in secrets if len(secret) >= _MIN_SECRET_LENGTH)
    return is_known or _KEY_LIKE_PATTERN.search(text) is not None


def remove_secret_arguments(arguments: Sequence[str], secrets: Collection[str] = ()) -> SecretArguments:
    """Return `arguments` without options whose values are secrets: by their name, by their form, or because they are in `secrets`."""
    remaining: list[str] = []
    removed: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        name, equals, value = argument.partition("=")
        if equals and _is_secret(name, value, secrets):
            removed.append(show_text(name))
        elif argument.startswith("-") and not equals and not following.startswith("-") and _is_secret(name, following, secrets):
            removed.append(show_text(name))
            index += 1
        elif _is_secret("", argument, secrets):
            removed.append(f"argument {index + 1}")
        else:
            remaining.append(argument)
        index += 1
    return SecretArguments(tuple(remaining), tuple(removed))


def _is_secret(name: str, value: str, secrets: Collection[str]) -> bool:
    name = name.lstrip("-+")
    if value.lower() in _SWITCH_VALUES:
        return False
    if is_secret_value(value, secrets):
        return True
    if _CREDENTIAL_NAME_PATTERN.fullmatch(name):
        return True
    return _NAME_PATTERN.fullmatch(name) is not None and _RANDOM_PATTERN.fullmatch(value) is not None
