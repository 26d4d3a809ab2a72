"""Each check on probe results: a healthy probe, with one problem at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import swarmtrain.doctor  # noqa: F401  # registers all checks
from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.fields.overlay_subnet import LARGE_SUBNET_RANGE
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.doctor.probe_results import CHECKS, ProbeResults
from swarmtrain.doctor.report import DoctorReport
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import Plan, build_plan

GIB = 1 << 30
NODES = ("node0", "node1", "node2")
PAIRS = (("node0", "node1"), ("node0", "node2"), ("node1", "node2"))


def plan_three_nodes(*, shared: bool = True, **runner: Any) -> Plan:
    docker = {"docker_container": "job:1", "docker_mounts": [["/mnt/shared", "/workspace/runs"], ["/mnt/data", "/data"]]}
    settings = {"nodes": 3, "docker_config": docker, **runner}
    config = Config.model_validate({"runner": settings, "trainer": {"save_dir": Path("runs/job"), "save_dir_shared": shared}})
    machines = tuple(Machine(host=f"gpu-{index}") for index in range(3))
    return build_plan(config, Inventory("the test", machines), Cargo(()), run="job")


def build_mount(target: str, **changes: Any) -> dict[str, Any]:
    return {
        "target": target,
        "writable": True,
        "free": 100 * GIB,
        "visible_nodes": list(NODES),
        "entries": 3,
        "content_digest": "abc",
        **changes,
    }


def build_node_facts(**changes: Any) -> dict[str, Any]:
    healthy = {
        "problems": [],
        "user": "1000:1000",
        "clock": 0.01,
        "names": dict.fromkeys(NODES, 0.001),
        "address": "10.0.1.4",
        "interface": "eth0",
        "interfaces": {"eth0": 1450, "eth1": 1500},
        "networks": {"eth0": "10.0.1.0/24", "eth1": "172.18.0.0/16"},
        "resolvers": ["192.168.1.1"],
        "slots": 2,
        "cores": 8,
        "memory": 64 * GIB,
        "shm": 8 * GIB,
        "scratch": 20 * GIB,
        "limits": {"nofile": 1048576, "memlock": 8 << 20, "stack": 8 << 20},
        "infiniband": [],
        "gpus": [],
        "assigned_gpus": [],
        "machine_gpus": [],
        "gpu_faults": [],
        "mounts": [build_mount("/workspace/runs"), build_mount("/data")],
    }
    return {**healthy, **changes}


def build_link(a: str, b: str, **changes: Any) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "round_trip": 0.0002,
        "forward_bandwidth": 1e9,
        "backward_bandwidth": 1e9,
        "largest_packet": 1450,
        "error": "",
        **changes,
    }


def build_collective_result(**changes: Any) -> dict[str, Any]:
    gloo = {"setup_seconds": 0.1, "seconds": 0.02, "bytes": 4.0 * (1 << 20), "large_seconds": 0.06, "large_bytes": 16.0 * (1 << 20)}
    return {"torch": "2.13.0", "cuda": None, "devices": 0, "gloo": gloo, **changes}


def build_healthy_probe() -> ProbeResults:
    return ProbeResults(
        plan_three_nodes(),
        {name: build_node_facts() for name in NODES},
        tuple(build_link(a, b) for a, b in PAIRS),
        {name: build_collective_result() for name in NODES},
        "",
        dict.fromkeys(NODES, "running"),
        machine_addresses={f"gpu-{index}": f"192.168.1.1{index}" for index in range(3)},
        swarm_subnets=("10.0.0.0/24", "10.0.1.0/24"),
    )


def change_node(**changes: Any) -> Callable[[ProbeResults], ProbeResults]:
    """Change what node1 reports."""
    return lambda results: replace(results, nodes={**results.nodes, "node1": {**results.nodes["node1"], **changes}})


def change_mount(target: str, **changes: Any) -> Callable[[ProbeResults], ProbeResults]:
    mounts = [build_mount(name, **(changes if name == target else {})) for name in ("/workspace/runs", "/data")]
    return change_node(mounts=mounts)


def deny_mount(owner: str) -> Callable[[ProbeResults], ProbeResults]:
    return change_mount("/workspace/runs", writable=False, write_error="permission denied", owner=owner)


def change_link(**changes: Any) -> Callable[[ProbeResults], ProbeResults]:
    return lambda results: replace(results, links=(*results.links[:2], {**results.links[2], **changes}))


def change_collective(**changes: Any) -> Callable[[ProbeResults], ProbeResults]:
    return lambda results: replace(
        results, collective_results={**results.collective_results, "node1": {**results.collective_results["node1"], **changes}}
    )


def change_plan(**runner: Any) -> Callable[[ProbeResults], ProbeResults]:
    return lambda results: replace(results, plan=plan_three_nodes(**runner))


def drop_node(results: ProbeResults) -> ProbeResults:
    remaining = {name: results.nodes[name] for name in ("node0", "node2")}
    return replace(
        results, nodes=remaining, service_states={**results.service_states, "node1": "pending: insufficient resources on 1 node"}
    )


def set_pulling(results: ProbeResults) -> ProbeResults:
    return replace(drop_node(results), service_states={**results.service_states, "node1": "preparing"}, image="job:1@sha256:abc")


def set_addresses(addresses: Mapping[str, str], **runner: Any) -> Callable[[ProbeResults], ProbeResults]:
    """Change the plan, and the addresses of these machines."""
    return lambda results: replace(change_plan(**runner)(results), machine_addresses={**results.machine_addresses, **addresses})


GPU = {"uuid": "GPU-1", "name": "H100", "driver": "570.1"}


def reserve_gpus(assigned: list[str], machine: list[str] | None = None, **changes: Any) -> Callable[[ProbeResults], ProbeResults]:
    """Assign these GPUs to node1; `machine` are the GPUs that its driver lists."""

    def change(results: ProbeResults) -> ProbeResults:
        results = promise_gpus()(results)
        gpu_plan = plan_three_nodes(default_gpu_count=2, swarm={"gpu": GpuMode.reserve})
        return change_node(assigned_gpus=assigned, machine_gpus=machine or [], **changes)(replace(results, plan=gpu_plan))

    return change


def promise_gpus(gpus: list[dict[str, str]] | None = None, devices: int = 2) -> Callable[[ProbeResults], ProbeResults]:
    """Expect two GPUs on each node. node1 has `gpus` and `devices` instead."""

    def change(results: ProbeResults) -> ProbeResults:
        nodes = {name: {**results.nodes[name], "gpus": [GPU, GPU]} for name in NODES}
        collectives = {name: {**results.collective_results[name], "devices": 2} for name in NODES}
        if gpus is not None:
            nodes["node1"]["gpus"] = gpus
        collectives["node1"]["devices"] = devices
        gpu_plan = plan_three_nodes(default_gpu_count=2, swarm={"gpu": GpuMode.visible})
        return replace(results, plan=gpu_plan, nodes=nodes, collective_results=collectives)

    return change


def set_old_driver(results: ProbeResults) -> ProbeResults:
    results = promise_gpus()(results)
    nodes = {**results.nodes, "node0": {**results.nodes["node0"], "gpus": []}, "node2": {**results.nodes["node2"], "gpus": []}}
    nodes["node1"] = {**results.nodes["node1"], "gpus": [{**GPU, "driver": "535.9"}] * 2}
    return replace(
        results, nodes=nodes, collective_results={name: {**facts, "cuda": "13.0"} for name, facts in results.collective_results.items()}
    )


@dataclass(frozen=True)
class ProbeCase:
    """A problem, the check that finds it, and a part of its message."""

    check: str
    change: Callable[[ProbeResults], ProbeResults]
    message: str
    fatal: bool = True
    hint: str = ""


CASES = [
    ProbeCase("probe", drop_node, "node1 on gpu-1: its probe did not report: pending: insufficient resources on 1 node"),
    ProbeCase("probe", lambda results: replace(results, failure_reason="no torch"), "run job: no torch"),
    ProbeCase("image", set_pulling, "image job:1@sha256:abc: 2 of 3 nodes have it. node1 on gpu-1: preparing"),
    ProbeCase("container", change_node(problems=["python cannot find torch"]), "node1 on gpu-1: python cannot find torch"),
    ProbeCase("clock", change_node(clock=-3.0), "its clock is 3.0 s behind the manager's", fatal=False),
    ProbeCase("names", change_node(names={"node0": 4.2, "node2": None}), "slow DNS: node0 after 4.2 s", fatal=False),
    ProbeCase("interface", change_node(interface=""), "no interface has the address 10.0.1.4"),
    ProbeCase("interface", change_node(interfaces={"eth0": 1400}), "the MTUs differ: node0 1450, node1 1400, node2 1450", fatal=False),
    ProbeCase(
        "subnet",
        change_node(resolvers=["10.0.0.2"]),
        "network 10.0.0.0/16: contains 10.0.0.2, a DNS resolver of node1 on gpu-1; Swarm assigns the subnets of the next runs from",
        fatal=False,
        hint="set runner.swarm.subnet: 10.",
    ),
    ProbeCase(
        "subnet",
        set_addresses({"gpu-1": "10.20.0.7", "gpu-2": "fd00::7"}, swarm={"subnet": "10.20.0.0/24"}),
        "network 10.20.0.0/24: contains 10.20.0.7, the address of gpu-1",
        fatal=False,
        hint="set runner.swarm.subnet: 10.",
    ),
    ProbeCase("links", change_link(error="timed out", largest_packet=0), "link node1 on gpu-1 to node2 on gpu-2: timed out"),
    ProbeCase(
        "packets", change_link(error="the data transfer stalled: timed out", largest_packet=1280), "packets over 1280 bytes are lost"
    ),
    ProbeCase(
        "bandwidth",
        change_link(backward_bandwidth=1.25e6),
        "carries 10 Mbit/s, but the median of the faster half of the links is 8.0 Gbit/s",
        fatal=False,
    ),
    ProbeCase("latency", change_link(round_trip=0.03), "has a round-trip time of 30.0 ms, but the median is 0.20 ms", fatal=False),
    ProbeCase("shm", change_node(shm=64 << 20), "/dev/shm has only 64 MiB for 2 ranks", fatal=False),
    ProbeCase("limits", change_node(limits={"nofile": 1024, "memlock": -1}), "processes may open only 1024 files", fatal=False),
    ProbeCase("limits", change_node(infiniband=["mlx5_0"]), "has mlx5_0, but processes can lock only 8192 KiB", fatal=False),
    ProbeCase("disk-space", change_node(scratch=0), "/tmp has 0.0 GiB left", fatal=False),
    ProbeCase("disk-space", change_node(memory=GIB // 2), "has 0.5 GiB of memory left for 2 ranks", fatal=False),
    ProbeCase("disk-space", change_mount("/workspace/runs", free=GIB), "/workspace/runs has 1.0 GiB left", fatal=False),
    ProbeCase("shared", change_mount("/workspace/runs", visible_nodes=["node1"]), "what node0, node2 wrote is missing"),
    ProbeCase(
        "shared", change_mount("/workspace/runs", writable=False, write_error="read-only file system"), "be written: read-only file system"
    ),
    ProbeCase(
        "shared",
        deny_mount("1234:100"),
        "it belongs to 1234:100, and the ranks run as 1000:1000",
        hint="runner.docker_config.user: 1234:100; or",
    ),
    ProbeCase(
        "shared", deny_mount("0:0"), "it belongs to 0:0, and the ranks run as 1000:1000", hint="chown -R 1000:1000 /mnt/shared, on gpu-1"
    ),
    ProbeCase("shared", change_plan(docker_config={"docker_container": "job:1"}), "is not inside a mount"),
    ProbeCase(
        "shared",
        change_plan(shared=False),
        "/workspace/runs is not a separate disk on node0, node1, node2: it contains files that other nodes wrote",
        hint="set trainer.save_dir_shared: true",
    ),
    ProbeCase(
        "shared",
        change_plan(shared=False, docker_config={"docker_container": "job:1"}),
        "is not inside a mount",
        hint="set runner.docker_config.docker_mounts: [[checkpoints, /workspace/runs]]",
    ),
    ProbeCase(
        "data",
        change_mount("/data", entries=2, content_digest="def"),
        "/data has different content on this node: 2 entries, but the others have 3",
    ),
    ProbeCase("torch", change_collective(torch="2.12.0"), "torch differs: node0 2.13.0, node1 2.12.0, node2 2.13.0"),
    ProbeCase("devices", promise_gpus(devices=1), "node1 on gpu-1: torch sees 1 GPU of 2, for 2 ranks"),
    ProbeCase("devices", promise_gpus(gpus=[], devices=0), "node1 on gpu-1: torch sees 0 GPUs of 0, for 2 ranks"),
    ProbeCase("devices", reserve_gpus(["GPU-1", "GPU-9"]), "Swarm assigned it GPU-9, but its GPUs are GPU-1, GPU-1"),
    ProbeCase("devices", reserve_gpus(["GPU-1"], ["GPU-1"], gpus=[]), "has 1 GPU, but its containers see none"),
    ProbeCase("devices", reserve_gpus(["GPU-1"]), "Swarm assigned it 1 GPU, but the container sees 2", fatal=False),
    ProbeCase(
        "gpu-health",
        change_node(gpu_faults=[{"message": "GPU 1 (0000:1b:00): Xid 79", "hint": "reset it", "is_hardware": True}]),
        "node1 on gpu-1: GPU 1 (0000:1b:00): Xid 79",
        hint="reset it",
    ),
    ProbeCase(
        "gpu-health",
        change_node(gpu_faults=[{"message": "GPU 1: clocks are reduced", "hint": "check fans", "is_hardware": False}]),
        "node1 on gpu-1: GPU 1: clocks are reduced",
        fatal=False,
    ),
    ProbeCase(
        "unused",
        change_node(machine_gpus=["GPU-1", "GPU-2"]),
        "node1 on gpu-1: has 2 GPUs, but the run uses none (gpu: none)",
        fatal=False,
        hint="-o runner.swarm.gpu=visible",
    ),
    ProbeCase(
        "unused",
        promise_gpus(gpus=[GPU] * 8),
        "node1 on gpu-1: has 8 GPUs, but 2 ranks",
        fatal=False,
        hint="-o runner.default_gpu_count=8, or 'gpu-1 slots=8' in runner.hosts",
    ),
    ProbeCase(
        "driver", promise_gpus(gpus=[{**GPU, "driver": "550.9"}] * 2), "drivers differ: node0 570.1, node1 550.9, node2 570.1", fatal=False
    ),
    ProbeCase("driver", set_old_driver, "node1 on gpu-1: driver 535.9 is too old for CUDA 13.0, which torch is built for"),
    ProbeCase("all-reduce", change_collective(error="timeout"), "the all-reduce failed: timeout"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}: {case.message[:30]}")
def test_what_is_wrong_is_found_by_its_check_alone(case: ProbeCase) -> None:
    results = case.change(build_healthy_probe())
    findings = {check.name: list(check.run_check(results)) for check in CHECKS.checks}
    [found] = findings[case.check]
    assert case.message in f"{found.place}: {found.message}"
    assert found.fatal is case.fatal
    assert found.hint
    assert found.hint.startswith(case.hint)
    assert found.why or case.check == "container"
    assert [name for name, others in findings.items() if others] == [case.check]


def test_settings_are_printed_as_they_are_to_be_written() -> None:
    devices = next(check for check in CHECKS.checks if check.name == "devices")
    [found] = devices.run_check(reserve_gpus(["GPU-1"], ["GPU-1", "GPU-2"], gpus=[])(build_healthy_probe()))
    _, daemon, toolkit, _ = (found.hint or "").replace("; in its", "\n").replace("daemon.json: ", "\n").replace("; then", "\n").split("\n")
    assert json.loads(daemon) == {
        "default-runtime": "nvidia",
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}},
        "node-generic-resources": ["NVIDIA-GPU=GPU-1", "NVIDIA-GPU=GPU-2"],
    }
    assert toolkit.endswith('swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"')


def test_the_suggested_subnet_is_free() -> None:
    results = set_addresses({"gpu-1": "10.20.0.7"}, swarm={"subnet": "10.20.0.0/20"})(build_healthy_probe())
    subnets = [str(subnet) for subnet in LARGE_SUBNET_RANGE.subnets(new_prefix=20)]
    suggestions = {read_suggested_subnet(replace(results, swarm_subnets=tuple(taken))) for taken in ([], subnets[:-1], subnets)}
    assert len(suggestions) == 3
    assert suggestions >= {subnets[-1], "SUBNET"}


def read_suggested_subnet(results: ProbeResults) -> str:
    [finding] = next(check for check in CHECKS.checks if check.name == "subnet").run_check(results)
    return (finding.hint or "").removeprefix("set runner.swarm.subnet: ").partition(";")[0]


def test_a_probe_of_an_older_image_reports_no_networks() -> None:
    results = build_healthy_probe()
    new_facts = ("networks", "resolvers")
    old_nodes = {name: {key: fact for key, fact in facts.items() if key not in new_facts} for name, facts in results.nodes.items()}
    assert [finding for check in CHECKS.checks for finding in check.run_check(replace(results, nodes=old_nodes))] == []


def test_a_network_that_is_not_the_runs_own_has_no_subnet_to_set() -> None:
    results = set_addresses({"gpu-1": "10.0.1.7"}, swarm={"network": "shared"})(build_healthy_probe())
    assert not list(next(check for check in CHECKS.checks if check.name == "subnet").run_check(results))


def test_there_is_a_case_for_every_check() -> None:
    assert {check.name for check in CHECKS.checks} == {case.check for case in CASES}


def test_a_sound_probe_has_no_findings() -> None:
    assert [finding for check in CHECKS.checks for finding in check.run_check(build_healthy_probe())] == []


def test_the_report_shows_findings_first_to_last_and_the_links_as_a_matrix() -> None:
    results = change_link(error="timed out", largest_packet=0)(build_healthy_probe())
    report = DoctorReport(CHECKS.run_checks(results), results)
    text = str(report)
    assert "ERROR links      link node1 on gpu-1 to node2 on gpu-2: timed out\n" in text
    assert "fix: open TCP and UDP 7946" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("node")]
    assert [row[0] for row in rows] == [*NODES, *NODES]
    assert rows[0][1:5] == ["gpu-0", "10.0.1.4", "eth0", "1450"]
    assert rows[4][-1] == "no"
    assert "all-reduce by gloo on 3 nodes: of 4 MiB 20.0 ms, of 16 MiB 60.0 ms" in text
    assert text.endswith("checks: 1 fatal, 0 warnings")
    values = report.to_dict()
    assert values["ok"] is False
    assert len(values["links"]) == 3
    assert deepcopy(values) == values


def test_a_slow_node_of_three_is_seen_though_most_links_are_its() -> None:
    results = build_healthy_probe()
    slow = {"forward_bandwidth": 2.5e6, "backward_bandwidth": 2.5e6}
    results = replace(results, links=(results.links[0], {**results.links[1], **slow}, {**results.links[2], **slow}))
    bandwidth = next(check for check in CHECKS.checks if check.name == "bandwidth")
    assert [finding.place for finding in bandwidth.run_check(results)] == [
        "link node0 on gpu-0 to node2 on gpu-2",
        "link node1 on gpu-1 to node2 on gpu-2",
    ]
