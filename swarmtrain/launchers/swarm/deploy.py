"""Steps → requests to the engine: what services need first, then the services side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.observe import observe
from swarmtrain.launchers.swarm.reconcile import Kind, Step, Verb
from swarmtrain.launchers.swarm.specs import Spec

_AT_ONCE = 8
_UPDATE_TRIES = 10
_Item = TypeVar("_Item")

Check = Callable[[], None]
"""Raises StackError if nothing may be changed any more."""


def apply(engine: Engine, stack: str, steps: list[Step], *, made: set[str], say: Say, check: Check) -> None:
    """Carry out `steps`, saying each. Raises EngineError, StackError.

    The names of what is created are added to `made`, before it is asked for: the answer may be lost.
    """
    for step in steps:
        if step.verb is Verb.create and step.kind is not Kind.service:
            say(str(step))
            check()
            _create(engine, step, made)
    services = [step for step in steps if step.kind is Kind.service]
    if services:
        there = observe(engine, stack)
        for step in services:
            say(str(step))
        check()
        side_by_side(lambda step: _service(engine, step, there.configs, there.secrets, made), services)
    for step in steps:
        if step.verb is Verb.remove and step.kind is not Kind.service:
            say(str(step))
            check()
            _remove(engine, step, say)


def side_by_side(work: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Do `work` on all items, a few at a time; the first error is raised when those that had begun are done."""
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="swarm")
    try:
        for future in [pool.submit(work, item) for item in items]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _create(engine: Engine, step: Step, made: set[str]) -> None:
    body = step.spec or {}
    made.add(step.name)
    try:
        if step.kind is Kind.network:
            # Before API 1.44 the engine makes a second network of the same name unless it is asked to look.
            engine.post("/networks/create", {"Name": step.name, "CheckDuplicate": True, **body})
        else:
            _check_content(step)
            engine.post(f"/{step.kind}s/create", body)
    except EngineError as error:
        if error.status != 409:
            raise
        # Somebody else made it since we looked. Contents are in the names of configs and secrets, so it is the same.
        made.discard(step.name)


def _check_content(step: Step) -> None:
    if step.kind is Kind.secret and not (step.spec or {}).get("Data"):
        raise StackError(
            "its content is not on the swarm any more and cannot be read back",
            place=f"secret {step.name}",
            hint="swarmtrain deploy CONFIG, which reads the secret's file again",
        )


def _service(engine: Engine, step: Step, configs: Mapping[str, str], secrets: Mapping[str, str], made: set[str]) -> None:
    if step.verb is Verb.remove:
        engine.delete(f"/services/{step.id}")
        return
    spec = with_ids(step.spec or {}, configs, secrets)
    image = spec["TaskTemplate"]["ContainerSpec"]["Image"]
    if step.verb is Verb.create:
        _create_service(engine, step, spec, image, made)
    else:
        update(engine, step.id, step.service.version if step.service else 0, spec)


def _create_service(engine: Engine, step: Step, spec: Spec, image: str, made: set[str]) -> None:
    made.add(step.name)
    try:
        engine.post("/services/create", spec, image=image)
    except EngineError as error:
        if error.status is not None:
            made.discard(step.name)
        if error.status == 409:
            raise StackError("somebody else has made it meanwhile", place=f"service {step.name}", hint="deploy again") from None
        raise


def update(engine: Engine, service: str, version: int, spec: Spec) -> None:
    """Give the service its new spec, again if somebody else changed it since it was read. Raises EngineError."""
    image = spec["TaskTemplate"]["ContainerSpec"]["Image"]
    for attempt in range(_UPDATE_TRIES):
        try:
            engine.post(f"/services/{service}/update", spec, {"version": str(version), "registryAuthFrom": "spec"}, image=image)
            return
        except EngineError as error:
            if "out of sequence" not in error.message or attempt == _UPDATE_TRIES - 1:
                raise
        time.sleep(0.1 * (attempt + 1))
        version = engine.get(f"/services/{service}")["Version"]["Index"]


def with_ids(spec: Spec, configs: Mapping[str, str], secrets: Mapping[str, str]) -> Spec:
    """Return a service's spec with the ids that its configs and secrets have on this swarm."""
    container = dict(spec["TaskTemplate"]["ContainerSpec"])
    for kind, ids in (("Config", configs), ("Secret", secrets)):
        if f"{kind}s" in container:
            container[f"{kind}s"] = [_with_id(reference, kind, ids) for reference in container[f"{kind}s"]]
    return {**spec, "TaskTemplate": {**spec["TaskTemplate"], "ContainerSpec": container}}


def _with_id(reference: dict[str, Any], kind: str, ids: Mapping[str, str]) -> dict[str, Any]:
    name = reference[f"{kind}Name"]
    if name not in ids:
        raise StackError("it was removed while the stack was brought up", place=f"{kind.lower()} {name}", hint="deploy again")
    return {**reference, f"{kind}ID": ids[name]}


def _remove(engine: Engine, step: Step, say: Say) -> None:
    try:
        engine.delete(f"/{step.kind}s/{step.id}")
    except EngineError as error:
        # Nothing is lost but tidiness: the next deploy tries again.
        say(f"{step.kind} {step.name} stays for now: {error.message}")
