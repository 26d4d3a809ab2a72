"""Channels that the policy of the queue adds to each run, on a swarm in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_swarm import FakeSwarm

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import ConfigError, StackError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.launchers.swarm import cluster_state, deployed_run
from swarmtrain.launchers.swarm.cluster_channels import add_cluster_channels
from swarmtrain.launchers.swarm.queue.policy_store import store_policy
from swarmtrain.launchers.swarm.reconcile import reconcile
from swarmtrain.launchers.swarm.service_specs import StackSpecs, build_stack_specs
from swarmtrain.launchers.swarm.step_executor import apply_steps
from swarmtrain.notifications.channel import decode_channels
from swarmtrain.planning.plan import build_plan
from swarmtrain.protocol import ENV_NOTIFY, LABEL_NOTIFY, RENDEZVOUS_SERVICE
from swarmtrain.queue_labels import ENV_QUEUE_STOP
from swarmtrain.render.stack_document import render_stack

POLICY = "notify: {ops: {swarm_secret: team, events: [outcome]}}\n"


@pytest.fixture
def swarm() -> Any:
    swarm: Any = FakeSwarm(2)
    swarm.post("/secrets/create", {"Name": "team", "Labels": {}, "Data": ""})
    return swarm


def build_specs(swarm: Any, *, is_notified: bool = False, internal: bool = False) -> StackSpecs:
    runner = {"nodes": 1, "docker_config": {"docker_container": "registry/image:1"}, "swarm": {"internal": internal}}
    notify = {"ci": {"secret": "webhook.secret"}} if is_notified else {}
    config = Config.model_validate_json(json.dumps({"runner": runner, "notify": notify}))
    secrets = (RunFile.from_content("TOKEN", b"hidden"), *((RunFile.from_content("notify-ci", b"url"),) if is_notified else ()))
    cargo = Cargo((RunFile.from_content("training_code.py", b"train()\n"),), secrets)
    stack = render_stack(build_plan(config, cluster_state.read_inventory(swarm), cargo, run="demo"))
    pinned = PinnedImage("registry/image:1@sha256:00", (("amd64", "linux"),))
    return build_stack_specs(stack, {service["image"]: pinned for service in stack.document["services"].values()})


def read_channels(spec: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the channels of a service, and of the secrets that it mounts."""
    container = spec["TaskTemplate"]["ContainerSpec"]
    variables = dict(item.partition("=")[::2] for item in container["Env"])
    names = [channel.name for channel in decode_channels(variables.get(ENV_NOTIFY, ""))]
    assert (ENV_QUEUE_STOP in variables) is bool(names)
    return names, sorted(item["File"]["Name"] for item in container.get("Secrets", []))


@pytest.mark.parametrize("is_notified", [True, False])
def test_the_coordinator_alone_gets_the_channels_of_the_policy(swarm: Any, *, is_notified: bool) -> None:
    store_policy(swarm, POLICY, source="policy.yml")
    plain = build_specs(swarm, is_notified=is_notified)
    specs = add_cluster_channels(swarm, plain)
    own = ["ci"] if is_notified else []
    coordinator = specs.services[f"demo_{RENDEZVOUS_SERVICE}"]
    assert read_channels(coordinator) == ([*own, "cluster-ops"], sorted(["notify-cluster-ops", *(f"notify-{name}" for name in own)]))
    assert LABEL_NOTIFY in coordinator["Labels"]
    assert specs.services["demo_node0"] == plain.services["demo_node0"]
    assert read_channels(specs.services["demo_node0"]) == ([], ["TOKEN"])


def test_a_run_with_such_a_channel_is_read_back_without_it_and_is_up_to_date(swarm: Any) -> None:
    store_policy(swarm, POLICY, source="policy.yml")
    specs = add_cluster_channels(swarm, build_specs(swarm, is_notified=True))
    steps = reconcile(specs, cluster_state.read_stack_state(swarm, "demo"))
    apply_steps(swarm, "demo", steps, created_names=set(), report_progress=lambda _line: None, check_lock=lambda: None)
    services = cluster_state.list_services(swarm, "demo")
    config, cargo = deployed_run.read_sent_deployment(swarm, services, "demo")
    assert list(config.notify) == ["ci"]
    assert [item.name for item in cargo.secrets] == ["TOKEN", "notify-ci"]
    again = add_cluster_channels(swarm, build_specs(swarm, is_notified=True))
    assert reconcile(again, cluster_state.read_stack_state(swarm, "demo")) == []


def test_without_channels_and_in_an_internal_network_nothing_is_added(swarm: Any) -> None:
    specs = build_specs(swarm)
    assert add_cluster_channels(swarm, specs) == specs
    store_policy(swarm, POLICY, source="policy.yml")
    internal = build_specs(swarm, internal=True)
    assert add_cluster_channels(swarm, internal) == internal


def test_a_missing_secret_and_an_invalid_channel_are_refused(swarm: Any) -> None:
    store_policy(swarm, POLICY.replace("team", "other"), source="policy.yml")
    with pytest.raises(StackError) as raised:
        add_cluster_channels(swarm, build_specs(swarm))
    assert raised.value.place == "queue policy notify.ops.swarm_secret"
    assert raised.value.hint == "docker secret create other FILE"
    for text, reason in (
        ("{ops: {}}", "is required"),
        ("{ops: {swarm_secret: team, secret: x}}", "known keys: events, swarm_secret, type"),
    ):
        with pytest.raises(ConfigError) as refused:
            store_policy(swarm, f"notify: {text}\n", source="policy.yml")
        assert reason in refused.value.plain_text


def test_the_name_of_a_channel_of_a_run_is_not_that_of_a_policy() -> None:
    with pytest.raises(ValueError, match="names that begin with cluster- are those of channels in the policy"):
        Config.model_validate_json(json.dumps({"notify": {"cluster-ops": {"secret": "x"}}}))
