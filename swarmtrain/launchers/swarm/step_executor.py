"""Apply reconcile steps by requests to the engine: first the objects that services need, then the services in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_outdated_version_error
from swarmtrain.launchers.swarm.cluster_state import Service, read_stack_state
from swarmtrain.launchers.swarm.reconcile import ObjectKind, ReconcileStep, StepVerb
from swarmtrain.launchers.swarm.service_specs import ApiSpec

_MAX_PARALLEL_REQUESTS = 8
_MAX_UPDATE_ATTEMPTS = 10
_Item = TypeVar("_Item")

LockCheck = Callable[[], None]
"""Function that raises StackError if the lock is lost, so that no more changes may be made."""


def apply_steps(
    engine: DockerEngine,
    stack: str,
    steps: list[ReconcileStep],
    *,
    created_names: set[str],
    report_progress: ProgressReporter,
    check_lock: LockCheck,
) -> None:
    """Apply `steps` in order, reporting each. Raises EngineError, StackError.

    The name of an object is added to `created_names` before the request that creates it is sent, since the response may be lost.
    """
    for step in steps:
        if step.verb is StepVerb.create and step.kind is not ObjectKind.service:
            report_progress(str(step))
            check_lock()
            _create_object(engine, step, created_names)
    services = [step for step in steps if step.kind is ObjectKind.service]
    if services:
        existing = read_stack_state(engine, stack)
        for step in services:
            report_progress(str(step))
        check_lock()
        run_in_parallel(lambda step: _apply_service_step(engine, step, existing.configs, existing.secrets, created_names), services)
    for step in steps:
        if step.verb is StepVerb.remove and step.kind is not ObjectKind.service:
            report_progress(str(step))
            check_lock()
            _remove_object(engine, step, report_progress)


def run_in_parallel(work: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Call `work` on all items, at most 8 in parallel. On an error, wait for the calls in progress, cancel the others, and raise it."""
    pool = ThreadPoolExecutor(_MAX_PARALLEL_REQUESTS, thread_name_prefix="swarm")
    try:
        for future in [pool.submit(work, item) for item in items]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _create_object(engine: DockerEngine, step: ReconcileStep, created_names: set[str]) -> None:
    body = step.spec or {}
    created_names.add(step.name)
    try:
        if step.kind is ObjectKind.network:
            # Before API 1.44 the engine creates a second network of the same name without CheckDuplicate.
            engine.post("/networks/create", {"Name": step.name, "CheckDuplicate": True, **body})
        else:
            _check_secret_content(step)
            engine.post(f"/{step.kind}s/create", body)
    except EngineError as error:
        if error.status != 409:
            raise
        # Another command has created the object meanwhile. The names of configs and secrets contain their digest, so its content is the
        # same; of the run's key, which has no digest, every process then gets the one that exists.
        created_names.discard(step.name)


def _check_secret_content(step: ReconcileStep) -> None:
    if step.kind is ObjectKind.secret and not (step.spec or {}).get("Data"):
        raise StackError(
            "its content is no longer in the swarm and cannot be read back",
            place=f"secret {step.name}",
            hint="run swarmtrain deploy CONFIG, which reads the secret's file again",
        )


def _apply_service_step(
    engine: DockerEngine,
    step: ReconcileStep,
    config_id_by_name: Mapping[str, str],
    secret_id_by_name: Mapping[str, str],
    created_names: set[str],
) -> None:
    if step.verb is StepVerb.remove:
        engine.delete(f"/services/{step.id}")
        return
    spec = resolve_config_and_secret_ids(step.spec or {}, config_id_by_name, secret_id_by_name)
    image = spec["TaskTemplate"]["ContainerSpec"]["Image"]
    if step.verb is StepVerb.create:
        _create_service(engine, step, spec, image, created_names)
    else:
        update_service(engine, step.id, step.service.version if step.service else 0, spec)


def _create_service(engine: DockerEngine, step: ReconcileStep, spec: ApiSpec, image: str, created_names: set[str]) -> None:
    created_names.add(step.name)
    try:
        engine.post("/services/create", spec, image=image)
    except EngineError as error:
        if error.status is not None:
            created_names.discard(step.name)
        if error.status == 409:
            raise StackError("was created by another command in the meantime", place=f"service {step.name}", hint="deploy again") from None
        raise


def update_service(engine: DockerEngine, service_id: str, version: int, spec: ApiSpec) -> None:
    """Update the service to the new spec. Retry if it was changed since it was read. Raises EngineError if the update is refused."""
    image = spec["TaskTemplate"]["ContainerSpec"]["Image"]
    for attempt in range(_MAX_UPDATE_ATTEMPTS):
        try:
            engine.post(f"/services/{service_id}/update", spec, {"version": str(version), "registryAuthFrom": "spec"}, image=image)
            return
        except EngineError as error:
            if not is_outdated_version_error(error) or attempt == _MAX_UPDATE_ATTEMPTS - 1:
                raise
        time.sleep(0.1 * (attempt + 1))
        version = engine.get(f"/services/{service_id}")["Version"]["Index"]


def scale_service_to_zero(engine: DockerEngine, service: Service) -> None:
    """Let Swarm stop the containers of `service`. Raises EngineError."""
    update_service(engine, service.id, service.version, {**service.spec, "Mode": {"Replicated": {"Replicas": 0}}})


def resolve_config_and_secret_ids(spec: ApiSpec, config_id_by_name: Mapping[str, str], secret_id_by_name: Mapping[str, str]) -> ApiSpec:
    """Return a service's spec with the ids that its configs and secrets have on this swarm."""
    container = dict(spec["TaskTemplate"]["ContainerSpec"])
    for kind, ids in (("Config", config_id_by_name), ("Secret", secret_id_by_name)):
        if f"{kind}s" in container:
            container[f"{kind}s"] = [_resolve_config_or_secret_id(reference, kind, ids) for reference in container[f"{kind}s"]]
    return {**spec, "TaskTemplate": {**spec["TaskTemplate"], "ContainerSpec": container}}


def _resolve_config_or_secret_id(reference: dict[str, Any], kind: str, id_by_name: Mapping[str, str]) -> dict[str, Any]:
    name = reference[f"{kind}Name"]
    if f"{kind}ID" in reference:  # an object that does not belong to the stack
        return reference
    if name not in id_by_name:
        raise StackError("was removed while the stack was being deployed", place=f"{kind.lower()} {name}", hint="deploy again")
    return {**reference, f"{kind}ID": id_by_name[name]}


def _remove_object(engine: DockerEngine, step: ReconcileStep, report_progress: ProgressReporter) -> None:
    try:
        engine.delete(f"/{step.kind}s/{step.id}")
    except EngineError as error:
        # Only the removal of an old object has failed: the next deploy retries it.
        report_progress(f"{step.kind} {step.name} could not be removed; the next deploy retries: {error.message}")
