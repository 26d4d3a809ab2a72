"""Each check on what probes told: a sound probe, and one thing wrong with it at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import swarmtrain.doctor  # noqa: F401  # registers all checks
from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.probed import CHECKS, Probed
from swarmtrain.doctor.report import Answer, Report
from swarmtrain.plan import Cargo, Inventory, Machine, Plan, make_plan

GIB = 1 << 30
NODES = ("node0", "node1", "node2")
PAIRS = (("node0", "node1"), ("node0", "node2"), ("node1", "node2"))


def plan(*, shared: bool = True, **runner: Any) -> Plan:
    docker = {"docker_container": "job:1", "docker_mounts": [["/mnt/shared", "/workspace/runs"], ["/mnt/data", "/data"]]}
    settings = {"nodes": 3, "docker_config": docker, **runner}
    config = Config.model_validate({"runner": settings, "trainer": {"save_dir": Path("runs/job"), "save_dir_shared": shared}})
    machines = tuple(Machine(host=f"gpu-{index}") for index in range(3))
    return make_plan(config, Inventory("the test", machines), Cargo(()), run="job")


def mount(target: str, **changes: Any) -> dict[str, Any]:
    return {"target": target, "writable": True, "free": 100 * GIB, "seen": list(NODES), "entries": 3, "content": "abc", **changes}


def facts(**changes: Any) -> dict[str, Any]:
    sound = {
        "problems": [],
        "user": "1000:1000",
        "clock": 0.01,
        "names": dict.fromkeys(NODES, 0.001),
        "address": "10.0.1.4",
        "interface": "eth0",
        "interfaces": {"eth0": 1450, "eth1": 1500},
        "slots": 2,
        "cores": 8,
        "memory": 64 * GIB,
        "shm": 8 * GIB,
        "scratch": 20 * GIB,
        "limits": {"nofile": 1048576, "memlock": 8 << 20, "stack": 8 << 20},
        "infiniband": [],
        "gpus": [],
        "given_gpus": [],
        "machine_gpus": [],
        "mounts": [mount("/workspace/runs"), mount("/data")],
    }
    return {**sound, **changes}


def link(a: str, b: str, **changes: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "round_trip": 0.0002, "there": 1e9, "back": 1e9, "packet": 1450, "error": "", **changes}


def together(**changes: Any) -> dict[str, Any]:
    gloo = {"formed": 0.1, "seconds": 0.02, "bytes": 4.0 * (1 << 20)}
    return {"torch": "2.13.0", "cuda": None, "devices": 0, "gloo": gloo, **changes}


def sound() -> Probed:
    return Probed(
        plan(),
        {name: facts() for name in NODES},
        tuple(link(a, b) for a, b in PAIRS),
        {name: together() for name in NODES},
        "",
        dict.fromkeys(NODES, "running"),
    )


def node(**changes: Any) -> Callable[[Probed], Probed]:
    """One node tells something else."""
    return lambda seen: replace(seen, nodes={**seen.nodes, "node1": {**seen.nodes["node1"], **changes}})


def on_mount(target: str, **changes: Any) -> Callable[[Probed], Probed]:
    mounts = [mount(name, **(changes if name == target else {})) for name in ("/workspace/runs", "/data")]
    return node(mounts=mounts)


def denied(owner: str) -> Callable[[Probed], Probed]:
    return on_mount("/workspace/runs", writable=False, refused="permission denied", owner=owner)


def one_link(**changes: Any) -> Callable[[Probed], Probed]:
    return lambda seen: replace(seen, links=(*seen.links[:2], {**seen.links[2], **changes}))


def met(**changes: Any) -> Callable[[Probed], Probed]:
    return lambda seen: replace(seen, together={**seen.together, "node1": {**seen.together["node1"], **changes}})


def planned(**runner: Any) -> Callable[[Probed], Probed]:
    return lambda seen: replace(seen, plan=plan(**runner))


def without(seen: Probed) -> Probed:
    told = {name: seen.nodes[name] for name in ("node0", "node2")}
    return replace(seen, nodes=told, states={**seen.states, "node1": "pending: insufficient resources on 1 node"})


def pulling(seen: Probed) -> Probed:
    return replace(without(seen), states={**seen.states, "node1": "preparing"}, image="job:1@sha256:abc")


GPU = {"uuid": "GPU-1", "name": "H100", "driver": "570.1"}


def reserved(given: list[str], machine: list[str] | None = None, **changes: Any) -> Callable[[Probed], Probed]:
    """Swarm gave a node these GPUs, and the machine has one and another."""

    def made(seen: Probed) -> Probed:
        seen = with_gpus()(seen)
        promised = plan(default_gpu_count=2, swarm={"gpu": GpuMode.reserve})
        return node(given_gpus=given, machine_gpus=machine or [], **changes)(replace(seen, plan=promised))

    return made


def with_gpus(gpus: list[dict[str, str]] | None = None, devices: int = 2) -> Callable[[Probed], Probed]:
    """Two GPUs are promised on each node, and are there but for one of them."""

    def made(seen: Probed) -> Probed:
        nodes = {name: {**seen.nodes[name], "gpus": [GPU, GPU]} for name in NODES}
        met_there = {name: {**seen.together[name], "devices": 2} for name in NODES}
        if gpus is not None:
            nodes["node1"]["gpus"] = gpus
        met_there["node1"]["devices"] = devices
        promised = plan(default_gpu_count=2, swarm={"gpu": GpuMode.visible})
        return replace(seen, plan=promised, nodes=nodes, together=met_there)

    return made


def with_old_driver(seen: Probed) -> Probed:
    seen = with_gpus()(seen)
    nodes = {**seen.nodes, "node0": {**seen.nodes["node0"], "gpus": []}, "node2": {**seen.nodes["node2"], "gpus": []}}
    nodes["node1"] = {**seen.nodes["node1"], "gpus": [{**GPU, "driver": "535.9"}] * 2}
    return replace(seen, nodes=nodes, together={name: {**facts, "cuda": "13.0"} for name, facts in seen.together.items()})


@dataclass(frozen=True)
class Case:
    """What is wrong, the check that finds it, and a part of what it says."""

    check: str
    wrong: Callable[[Probed], Probed]
    says: str
    fatal: bool = True
    hint: str = ""


CASES = [
    Case("probe", without, "node1 on gpu-1: its probe told nothing: pending: insufficient resources on 1 node"),
    Case("probe", lambda seen: replace(seen, verdict="no torch"), "run job: no torch"),
    Case("image", pulling, "image job:1@sha256:abc: 2 of 3 nodes have it. node1 on gpu-1: preparing"),
    Case("container", node(problems=["python cannot find torch"]), "node1 on gpu-1: python cannot find torch"),
    Case("clock", node(clock=-3.0), "its clock is 3.0 s behind the manager's", fatal=False),
    Case("names", node(names={"node0": 4.2, "node2": None}), "finds node0 after 4.2 s", fatal=False),
    Case("interface", node(interface=""), "no interface has the address 10.0.1.4"),
    Case("interface", node(interfaces={"eth0": 1400}), "the largest packets differ: node0 1450, node1 1400, node2 1450", fatal=False),
    Case("links", one_link(error="timed out", packet=0), "link node1 on gpu-1 to node2 on gpu-2: timed out"),
    Case("packets", one_link(error="data stops on its way: timed out", packet=1280), "packets over 1280 bytes are lost"),
    Case("bandwidth", one_link(back=1.25e6), "carries 10 Mbit/s, where the faster half of the links has 8.0 Gbit/s", fatal=False),
    Case("latency", one_link(round_trip=0.03), "answers after 30.0 ms, where the median is 0.20 ms", fatal=False),
    Case("shm", node(shm=64 << 20), "/dev/shm has 64 MiB for 2 ranks", fatal=False),
    Case("limits", node(limits={"nofile": 1024, "memlock": -1}), "processes may open 1024 files", fatal=False),
    Case("limits", node(infiniband=["mlx5_0"]), "has mlx5_0, and processes may lock 8192 KiB", fatal=False),
    Case("room", node(scratch=0), "/tmp has 0.0 GiB left", fatal=False),
    Case("room", node(memory=GIB // 2), "has 0.5 GiB of memory left for 2 ranks", fatal=False),
    Case("room", on_mount("/workspace/runs", free=GIB), "/workspace/runs has 1.0 GiB left", fatal=False),
    Case("shared", on_mount("/workspace/runs", seen=["node1"]), "what node0, node2 wrote is not in it"),
    Case("shared", on_mount("/workspace/runs", writable=False, refused="read-only file system"), "be written: read-only file system"),
    Case(
        "shared", denied("1234:100"), "it belongs to 1234:100, and the ranks are 1000:1000", hint="runner.docker_config.user: 1234:100; or"
    ),
    Case("shared", denied("0:0"), "it belongs to 0:0, and the ranks are 1000:1000", hint="chown -R 1000:1000 /mnt/shared, on gpu-1"),
    Case("shared", planned(docker_config={"docker_container": "job:1"}), "lies in no mount"),
    Case(
        "shared",
        planned(shared=False),
        "/workspace/runs is no disk of its own on node0, node1, node2: it has what others wrote",
        hint="trainer.save_dir_shared: true",
    ),
    Case(
        "shared",
        planned(shared=False, docker_config={"docker_container": "job:1"}),
        "lies in no mount",
        hint="runner.docker_config.docker_mounts: [[checkpoints, /workspace/runs]]",
    ),
    Case("data", on_mount("/data", entries=2, content="def"), "/data holds something else here: 2 entries, where the others have 3"),
    Case("torch", met(torch="2.12.0"), "torch differs: node0 2.13.0, node1 2.12.0, node2 2.13.0"),
    Case("devices", with_gpus(devices=1), "node1 on gpu-1: torch sees 1 GPU of 2, for 2 ranks"),
    Case("devices", with_gpus(gpus=[], devices=0), "node1 on gpu-1: torch sees 0 GPUs of 0, for 2 ranks"),
    Case("devices", reserved(["GPU-1", "GPU-9"]), "Swarm gave it GPU-9, and its GPUs are GPU-1, GPU-1"),
    Case("devices", reserved(["GPU-1"], ["GPU-1"], gpus=[]), "has 1 GPU, and its containers see none"),
    Case("devices", reserved(["GPU-1"]), "Swarm gave it 1 GPU, and the container sees 2", fatal=False),
    Case("driver", with_gpus(gpus=[{**GPU, "driver": "550.9"}] * 2), "drivers differ: node0 570.1, node1 550.9, node2 570.1", fatal=False),
    Case("driver", with_old_driver, "node1 on gpu-1: driver 535.9 is too old for CUDA 13.0, which torch is built for"),
    Case("together", met(error="timeout"), "no all-reduce: timeout"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}: {case.says[:30]}")
def test_what_is_wrong_is_found_by_its_check_alone(case: Case) -> None:
    seen = case.wrong(sound())
    findings = {check.name: list(check.find(seen)) for check in CHECKS.all}
    [found] = findings[case.check]
    assert case.says in f"{found.place}: {found.message}"
    assert found.fatal is case.fatal
    assert found.hint
    assert found.hint.startswith(case.hint)
    assert found.why or case.check == "container"
    assert [name for name, others in findings.items() if others] == [case.check]


def test_settings_are_printed_as_they_are_to_be_written() -> None:
    devices = next(check for check in CHECKS.all if check.name == "devices")
    [found] = devices.find(reserved(["GPU-1"], ["GPU-1", "GPU-2"], gpus=[])(sound()))
    _, daemon, toolkit, _ = (found.hint or "").replace("; in its", "\n").replace("daemon.json: ", "\n").replace("; then", "\n").split("\n")
    assert json.loads(daemon) == {
        "default-runtime": "nvidia",
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}},
        "node-generic-resources": ["NVIDIA-GPU=GPU-1", "NVIDIA-GPU=GPU-2"],
    }
    assert toolkit.endswith('swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"')


def test_there_is_a_case_for_every_check() -> None:
    assert {check.name for check in CHECKS.all} == {case.check for case in CASES}


def test_a_sound_probe_has_no_findings() -> None:
    assert [finding for check in CHECKS.all for finding in check.find(sound())] == []


def test_the_report_shows_findings_first_to_last_and_the_links_as_a_matrix() -> None:
    seen = one_link(error="timed out", packet=0)(sound())
    answers = tuple(Answer(check.name, check.asks, tuple(check.find(seen))) for check in CHECKS.all)
    text = str(Report(answers, seen))
    assert "ERROR links      link node1 on gpu-1 to node2 on gpu-2: timed out\n" in text
    assert "mend: open TCP and UDP 7946" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("node")]
    assert [row[0] for row in rows] == [*NODES, *NODES]
    assert rows[0][1:5] == ["gpu-0", "10.0.1.4", "eth0", "1450"]
    assert rows[4][-1] == "no"
    assert "all-reduce of 4 MiB on 3 nodes by gloo: 20.0 ms" in text
    assert text.endswith("checks: 1 to mend before a run can work, 0 to know of")
    values = Report(answers, seen).to_dict()
    assert values["sound"] is False
    assert len(values["links"]) == 3
    assert deepcopy(values) == values


def test_a_slow_node_of_three_is_seen_though_most_links_are_its() -> None:
    seen = sound()
    slow = {"there": 2.5e6, "back": 2.5e6}
    seen = replace(seen, links=(seen.links[0], {**seen.links[1], **slow}, {**seen.links[2], **slow}))
    bandwidth = next(check for check in CHECKS.all if check.name == "bandwidth")
    assert [finding.place for finding in bandwidth.find(seen)] == [
        "link node0 on gpu-0 to node2 on gpu-2",
        "link node1 on gpu-1 to node2 on gpu-2",
    ]
