"""What becomes of each key of a source: it is carried into the config, or left out with a reason. Nothing else can happen to one.

A format's module fills a Book and closes it; what it did not speak of is left out too, as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from swarmtrain.config import Config
from swarmtrain.config.explain import explain
from swarmtrain.config.load import order_problems
from swarmtrain.config.runner import RunnerType
from swarmtrain.errors import ConfigError, Problem

Key = tuple[str, ...]
_ABSENT = object()
_LONGEST = 40
_BATCH = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")
_INLINE = re.compile(r"(\b\w*(?:key|token|secret|passw(?:or)?d)\"?\s*[=:]\s*\"?)[^\s\",{}\[\]]+", re.IGNORECASE)
# What is nearest to a way of running that this version has no launcher for.
_NEAREST = {"pdsh": "swarm", "pdsh_docker": "swarm", "slurm": "swarm", "docker": "local"}


class Why(StrEnum):
    """Why something of a source is not in the config."""

    unknown = "is not known here"
    nothing = "has no counterpart"
    otherwise = "is done otherwise"
    default = "is the default here"


@dataclass(frozen=True)
class LeftOut:
    """Something of a source that is not in the config: its key and line (1-based) there, and what to do instead."""

    key: str
    line: int | None
    value: str
    why: Why
    instead: str


@dataclass(frozen=True)
class Imported:
    """A config's values, in the config's order and less its defaults; what is not in them; what to know about them."""

    values: dict[str, Any]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    used: frozenset[Key] = frozenset()
    """Keys of the source that values were made of."""


class Book:
    """A source's values, and what becomes of each."""

    def __init__(self, source: dict[str, Any], lines: Mapping[str, int] | None = None, *, short: bool = False) -> None:
        """`lines` has the line of each dotted key. `short`: the last part of a key is enough to be found by its line."""
        self._short = short
        self.source = _with_text_keys(source)
        self._lines = dict(lines or {})
        self._done: set[Key] = set()
        self._values: dict[Key, Any] = {}
        self._origins: dict[Key, Key] = {}
        self._left: list[LeftOut] = []
        self._told: list[Key] = []
        self._notes: list[str] = []

    def get(self, key: str | Key, default: Any = None) -> Any:
        """Return what stands at `key`, and `default` if nothing does."""
        value: Any = self.source
        for part in _key(key):
            if not isinstance(value, dict | list):
                return default
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (LookupError, ValueError):
                return default
        return value

    def mapping(self, key: str | Key) -> dict[str, Any]:
        """Return the mapping at `key`, an empty one if there is none."""
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    def items(self, key: str | Key) -> list[Any]:
        """Return the list at `key`, an empty one if there is none."""
        value = self.get(key)
        return value if isinstance(value, list) else []

    def has(self, key: str | Key) -> bool:
        """Return whether anything stands at `key`, null too."""
        return self.get(key, _ABSENT) is not _ABSENT

    def rename(self, section: Key, old: str, new: str) -> None:
        """Take the older name `old` of a key in `section` for the present one."""
        inside, before = self.get(section) if section else self.source, ".".join((*section, old))
        if isinstance(inside, dict) and old in inside and new not in inside:
            inside[new] = inside.pop(old)
            after = ".".join((*section, new))
            self._lines |= {after + at.removeprefix(before): line for at, line in self._lines.items() if f"{at}.".startswith(f"{before}.")}

    def leaves(self, key: str | Key = ()) -> Iterator[tuple[Key, Any]]:
        """Yield what stands at and below `key`, each value that is neither a mapping nor a list, or an empty one."""
        yield from _leaves(_key(key), self.get(key, {}) if key else self.source)

    def carry(self, key: str | Key, path: str | Key, value: Any = _ABSENT) -> None:
        """Put what stands at `key`, or `value` that was made of it, at `path` of the config."""
        at, place = _key(key), _key(path)
        given = self.get(at) if value is _ABSENT else value
        before = self._origins.get(place)
        if before not in (None, at) and not isinstance(given, list | dict) and self._values.get(place) != given:
            self.leave(before, Why.otherwise, f"{'.'.join(at)} wins")
        self._done.add(at)
        self._origins[place], self._values[place] = at, given

    def put(self, path: str | Key, value: Any) -> None:
        """Put at `path` of the config what the source means without saying so."""
        self._values[_key(path)] = value

    def drop(self, path: str | Key) -> None:
        """Take back what was put at `path` of the config."""
        self._values.pop(_key(path), None)
        self._origins.pop(_key(path), None)

    def carried(self, path: str | Key) -> Any:
        """Return what was put at `path` of the config so far; None if nothing was."""
        return self._values.get(_key(path))

    def leave(self, key: str | Key, why: Why, instead: str = "", *, value: Any = _ABSENT) -> None:
        """Leave out what stands at `key`. `instead` says what to do, or why there is nothing to be done."""
        at = _key(key)
        self._done.add(at)
        shown = self.get(at) if value is _ABSENT else value
        self._told.append(at)
        text = "…" if is_secret(at[-1]) else _short(shown)
        self._left.append(LeftOut(at[-1].rstrip("'") if self._short else ".".join(at), self.line(at), text, why, instead))

    def use(self, *keys: str | Key) -> None:
        """Mark `keys` as having done their part in what was carried for others."""
        self._done.update(_key(key) for key in keys)

    def note(self, text: str) -> None:
        """Say something about the config, once."""
        if text not in self._notes:
            self._notes.append(text)

    def spoken(self, key: Key) -> bool:
        """Return whether something was said of `key` so far."""
        return key in self._done

    def line(self, key: Key) -> int | None:
        """Return the line of `key`, or that of the innermost key around it that has one."""
        while key and ".".join(key) not in self._lines:
            key = key[:-1]
        return self._lines.get(".".join(key))

    def place(self, wanted: str, key: str | Key = ()) -> str:
        """Put the kind of launcher that the source ran on, or the nearest that there is, and return it."""
        there = [kind.value for kind in RunnerType]
        kind = wanted if wanted in there else _NEAREST[wanted]
        if kind != wanted:
            self.note(f"it ran by {wanted}, for which there is no runner_type: runner.runner_type is {kind}")
        if key and kind == wanted:
            self.carry(key, "runner.runner_type", kind)
        else:
            self.put("runner.runner_type", kind)
        if key and kind != wanted:
            self.leave(key, Why.nothing, f"runner.runner_type: {kind}")
        return kind

    def show_gpus(self) -> None:
        """Let containers see their machine's GPUs, where that must be said."""
        if self.carried("runner.runner_type") in (None, "swarm") and self.carried("runner.swarm.gpu") is None:
            self.put("runner.swarm.gpu", "visible")

    def close(self, source: str) -> Imported:
        """Return what has become of it all. Raises ConfigError, with the places of `source`, if the config would not load."""
        for key in self._unspoken():
            self.leave(key, Why.nothing, "unknown to swarmtrain")
        self._fill_batch()
        config = self._checked(source)
        given = config.model_dump(mode="json")
        kept = {path: value for path, value in self._values.items() if not _same(path, given, _usual())}
        kept = {path: value for path, value in kept.items() if value is not None or path[0] != "topology"}
        if any(path[0] == "topology" for path in kept):
            kept |= {
                path: value for path, value in self._values.items() if path[0] == "topology" and path[-1] in _BATCH and value is not None
            }
        used = {self._origins[path] for path in kept if path in self._origins}
        told = set(self._told)
        for path, key in self._origins.items():
            if path not in kept and key not in used | told:
                self.leave(key, Why.default, ".".join(path), value=self.get(key, self._values[path]))
        order = list(Why)
        left = sorted(self._left, key=lambda one: (order.index(one.why), one.line or 0))
        return Imported(_ordered(_nested(kept), Config), tuple(left), tuple(self._notes), frozenset(self._done))

    def _fill_batch(self) -> None:
        """A batch of which nothing is known is the default one, as is said."""
        topology = {path[1]: value for path, value in self._values.items() if path[0] == "topology" and value is not None}
        if not topology or sum(name in topology for name in _BATCH) > 1:
            return
        usual = Config().topology
        for name in _BATCH[:2]:
            if name not in topology:
                other = topology.get("micro_batch_size") or topology.get("global_batch_size")
                self.put(f"topology.{name}", other or getattr(usual, name))
        self.note("the source does not say both topology.global_batch_size and micro_batch_size: what stands there is a guess, so set them")

    def _checked(self, source: str) -> Config:
        try:
            return Config.model_validate_json(json.dumps(_nested(self._values)))
        except ValidationError as error:
            blamed = [self._blamed(problem) for problem in explain(error, Config, {})]
            raise ConfigError(order_problems(blamed), source=source) from None

    def _blamed(self, problem: Problem) -> Problem:
        path = tuple(problem.path.split(".")) if problem.path else ()
        near = [at for at in self._origins if at[: len(path)] == path or path[: len(at)] == at]
        if not near:
            return problem
        key = self._origins[max(near, key=lambda at: len([None for one, other in zip(at, path, strict=False) if one == other]))]
        return Problem(f"{'.'.join(key)}, here {problem.path}", problem.message, self.line(key), problem.hint)

    def _unspoken(self) -> list[Key]:
        """Return the outermost keys of which nothing at or below was spoken, and which lie below none that was."""
        found: list[Key] = []
        around = {done[:length] for done in self._done for length in range(len(done))}

        def look(key: Key, value: Any) -> None:
            if key in self._done:
                return
            if key and key not in around:
                found.append(key)
            elif isinstance(value, dict | list):
                for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                    look((*key, str(name)), item)

        look((), self.source)
        return found


@cache
def known(path: str | Key) -> bool:
    """Return whether the config has a field, and not a section, at `path`."""
    model: Any = Config
    parts = _key(path)
    for depth, part in enumerate(parts):
        if part not in model.model_fields:
            return False
        kind = next((one for one in _kinds(model.model_fields[part].annotation) if _is_section(one)), None)
        if kind is None:
            return depth == len(parts) - 1
        model = kind
    return False


def kinds(path: str | Key) -> tuple[Any, ...]:
    """Return the types that the field at `path` can have."""
    model: Any = Config
    *sections, name = _key(path)
    for part in sections:
        model = next(one for one in _kinds(model.model_fields[part].annotation) if _is_section(one))
    return _kinds(model.model_fields[name].annotation)


def is_secret(name: str) -> bool:
    """Return whether a variable or field of this name holds what nobody is to see."""
    return name.upper().endswith(_SECRET)


def _with_text_keys(value: Any) -> Any:
    """Return `value` with the keys of its mappings as text, as other tools' keys are: YAML also has numbers and null as keys."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _key(key: str | Key) -> Key:
    return tuple(key.split(".")) if isinstance(key, str) else key


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves((*key, str(name)), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves((*key, str(index)), item)
    else:
        yield key, value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types that `annotation` is of, if it is a union, else itself."""
    inner = get_args(annotation)
    return inner if type(None) in inner else (annotation,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@cache
def _usual() -> dict[str, Any]:
    return Config().model_dump(mode="json")


def _same(path: Key, given: Any, usual: Any) -> bool:
    for part in path:
        if not isinstance(given, dict) or not isinstance(usual, dict) or part not in given or part not in usual:
            return False
        given, usual = given[part], usual[part]
    return bool(given == usual)


def _nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for (*sections, name), value in values.items():
        place = made
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = value
    return made


def _ordered(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    made = {}
    for name, field in model.model_fields.items():
        if name in values:
            section = next((one for one in _kinds(field.annotation) if _is_section(one)), None)
            made[name] = _ordered(values[name], section) if section and isinstance(values[name], dict) else values[name]
    return made


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = _INLINE.sub(r"\1…", text[: 9 * _LONGEST])
    plain = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"
