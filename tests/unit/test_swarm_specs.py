"""The stack document as service specs: field by field what docker/cli 28.2 sends for the same file. The lab tests it on a real swarm."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from swarmtrain.errors import StackError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.launchers.swarm.service_specs import StackSpecs, build_stack_specs, parse_duration_ns, parse_size_bytes
from swarmtrain.render.stack_document import Stack

IMAGE = "registry.lab:5000/swarmtrain:1"
PINNED = PinnedImage(f"{IMAGE}@sha256:{'0' * 64}", (("amd64", "linux"), ("arm", "linux")))
LABELS = {"com.docker.stack.namespace": "run"}


def build_service(**changes: Any) -> dict[str, Any]:
    return {
        "image": IMAGE,
        "entrypoint": ["python3", "-m", "swarmtrain.entrypoint"],
        "command": ["node"],
        "init": True,
        "environment": {"Z": "1", "A": "x=y $HOME"},
        "networks": ["training"],
        "stop_grace_period": "1m30s",
        "logging": {"driver": "json-file", "options": {"max-size": "20m"}},
        "configs": [{"source": "code-b", "target": "/workspace/b.py"}, {"source": "code-a", "target": "/workspace/a.py", "mode": 0o400}],
        "volumes": [
            {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 1024}},
            {"type": "bind", "source": "/data", "target": "/data"},
        ],
        "ulimits": {"stack": {"soft": 1, "hard": 2}, "memlock": -1},
        "cap_add": ["ipc_lock"],
        "deploy": {
            "mode": "replicated",
            "replicas": 1,
            "endpoint_mode": "dnsrr",
            "labels": {"swarmtrain.run": "run"},
            "placement": {"constraints": ["node.hostname==gpu-1"]},
            "restart_policy": {"condition": "on-failure", "delay": "2s"},
            "update_config": {"parallelism": 1, "order": "stop-first", "failure_action": "continue"},
            "resources": {
                "limits": {"cpus": "1.5", "memory": "512m"},
                "reservations": {"generic_resources": [{"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 2}}]},
            },
        },
        **changes,
    }


def convert_service(node: dict[str, Any], **document: Any) -> StackSpecs:
    stack_document = {
        "version": "3.8",
        "x-swarmtrain": {},
        "services": {"node0": node},
        "networks": {"training": {"driver": "overlay", "attachable": False, "driver_opts": {"encrypted": "true"}}},
        "configs": {"code-a": {"file": "generated/a.py"}, "code-b": {"file": "generated/b.py"}},
        **document,
    }
    return build_stack_specs(Stack("run", stack_document, {"generated/a.py": b"a", "generated/b.py": b"b"}), {IMAGE: PINNED})


def test_a_service_is_what_the_docker_cli_sends() -> None:
    assert convert_service(build_service()).services["run_node0"] == {
        "Name": "run_node0",
        "Labels": {"swarmtrain.run": "run", **LABELS, "com.docker.stack.image": IMAGE},
        "TaskTemplate": {
            "ContainerSpec": {
                "Image": PINNED.reference,
                "Labels": LABELS,
                "Command": ["python3", "-m", "swarmtrain.entrypoint"],
                "Args": ["node"],
                "Env": ["A=x=y $HOME", "Z=1"],
                "Init": True,
                "Mounts": [
                    {"Type": "tmpfs", "Target": "/dev/shm", "TmpfsOptions": {"SizeBytes": 1024}},
                    {"Type": "bind", "Source": "/data", "Target": "/data"},
                ],
                "StopGracePeriod": 90_000_000_000,
                "Configs": [
                    {"File": {"Name": "/workspace/a.py", "UID": "0", "GID": "0", "Mode": 0o400}, "ConfigName": "run_code-a"},
                    {"File": {"Name": "/workspace/b.py", "UID": "0", "GID": "0", "Mode": 0o444}, "ConfigName": "run_code-b"},
                ],
                "CapabilityAdd": ["CAP_IPC_LOCK"],
                "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}, {"Name": "stack", "Soft": 1, "Hard": 2}],
                "Privileges": {"CredentialSpec": None, "SELinuxContext": None},
            },
            "Resources": {
                "Limits": {"NanoCPUs": 1_500_000_000, "MemoryBytes": 512 * 2**20},
                "Reservations": {"GenericResources": [{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 2}}]},
            },
            "RestartPolicy": {"Condition": "on-failure", "Delay": 2_000_000_000},
            "Placement": {
                "Constraints": ["node.hostname==gpu-1"],
                "Platforms": [{"Architecture": "amd64", "OS": "linux"}, {"OS": "linux"}],
            },
            "Networks": [{"Target": "run_training", "Aliases": ["node0"]}],
            "LogDriver": {"Name": "json-file", "Options": {"max-size": "20m"}},
        },
        "Mode": {"Replicated": {"Replicas": 1}},
        "UpdateConfig": {"Parallelism": 1, "FailureAction": "continue", "MaxFailureRatio": 0, "Order": "stop-first"},
        "EndpointSpec": {"Mode": "dnsrr"},
    }


def test_networks_and_configs() -> None:
    found = convert_service(build_service())
    assert found.networks == {
        "run_training": {
            "Driver": "overlay",
            "Options": {"encrypted": "true"},
            "Internal": False,
            "Attachable": False,
            "Labels": LABELS,
        }
    }
    assert found.configs["run_code-a"] == {"Name": "run_code-a", "Labels": LABELS, "Data": base64.b64encode(b"a").decode()}
    assert not found.external_networks


def test_a_wide_subnet_reaches_the_engine() -> None:
    networks = {"training": {"driver": "overlay", "ipam": {"config": [{"subnet": "10.128.0.0/16"}]}}}
    assert convert_service(build_service(), networks=networks).networks["run_training"]["IPAM"] == {"Config": [{"Subnet": "10.128.0.0/16"}]}


def test_an_external_network_is_used_by_its_own_name() -> None:
    found = convert_service(build_service(), networks={"training": {"external": True, "name": "site"}})
    assert found.external_networks == ("site",)
    assert not found.networks
    assert found.services["run_node0"]["TaskTemplate"]["Networks"] == [{"Target": "site", "Aliases": ["node0"]}]


def test_the_host_network_has_no_aliases() -> None:
    found = convert_service(build_service(), networks={"training": {"external": True, "name": "host"}})
    assert found.services["run_node0"]["TaskTemplate"]["Networks"] == [{"Target": "host"}]


def test_volumes_are_scoped_to_the_stack_unless_external() -> None:
    mounts = [{"type": "volume", "source": "own", "target": "/own"}, {"type": "volume", "source": "theirs", "target": "/theirs"}]
    found = convert_service(build_service(volumes=mounts), volumes={"own": {}, "theirs": {"external": True}})
    assert found.services["run_node0"]["TaskTemplate"]["ContainerSpec"]["Mounts"] == [
        {"Type": "volume", "Source": "run_own", "Target": "/own", "VolumeOptions": {"Labels": LABELS}},
        {"Type": "volume", "Source": "theirs", "Target": "/theirs", "VolumeOptions": {}},
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"ports": ["80:80"]}, "ports"), ({"deploy": {"rollback_config": {}}}, "rollback_config")],
    ids=["service", "deploy"],
)
def test_a_key_that_cannot_be_sent_is_refused_and_not_dropped(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StackError, match=named):
        convert_service(build_service(**changes))


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90 * 10**9), ("1m30s", 90 * 10**9), ("2.5s", 25 * 10**8), ("1h", 3600 * 10**9), ("5ms", 5 * 10**6)]
)
def test_durations(text: str, expected: int) -> None:
    assert parse_duration_ns(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("1024", 1024), ("512m", 512 * 2**20), ("16gib", 16 * 2**30), ("1.5k", 1536), ("7b", 7)])
def test_sizes(text: str, expected: int) -> None:
    assert parse_size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "90", "s", "1x", "1s2"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(StackError, match="is not a duration"):
        parse_duration_ns(text)


def test_an_invalid_size_is_refused() -> None:
    with pytest.raises(StackError, match="is not a valid size"):
        parse_size_bytes("many")
