"""Each check on a swarm with the problem that it looks for, and healthy swarms on which no check reports anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from swarm_builders import (
    build_discrete_resources,
    build_managers,
    build_named_resources,
    build_node,
    build_service,
    build_swarm,
    build_task,
    plan_hosts,
)

from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.images import PinnedImage
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.swarm.checks.capacity_checks import needs_reserved_gpus
from swarmtrain.launchers.swarm.checks.cluster_checks import CHECKS, ClusterSnapshot

GPUS = {"GenericResources": build_named_resources("GPU-a", "GPU-b")}
OTHER_SERVICES = (build_service("other", "node0"), build_service("other", "rendezvous", role="rendezvous"))
THREE_RANKS = plan_hosts("gpu-1 slots=3")


@dataclass(frozen=True)
class CheckCase:
    """A swarm on which the check `name` reports `message` about `place`."""

    name: str
    snapshot: ClusterSnapshot
    place: str
    message: str
    hint: str
    fatal: bool


CASES = (
    CheckCase(
        "quorum",
        replace(build_swarm(), nodes=build_managers({}, {}, {})),
        "swarm",
        "has no leader",
        "--force-new-cluster",
        True,
    ),
    CheckCase(
        "quorum",
        build_swarm(*build_managers({"Reachability": "unreachable"}, {})),
        "node gpu-1",
        "is not reachable from the other managers",
        "docker node demote gpu-1",
        False,
    ),
    CheckCase(
        "quorum",
        build_swarm(*build_managers({"Reachability": "unreachable"})),
        "node gpu-1",
        "is not reachable from the other managers",
        "systemctl start docker",
        True,
    ),
    CheckCase(
        "quorum",
        build_swarm(*build_managers({})),
        "swarm",
        "has 2 managers, and cannot lose any of them",
        "docker node demote gpu-1",
        False,
    ),
    CheckCase(
        "quorum",
        build_swarm(*build_managers({}, {}, {}), build_node(4, State="down"), build_node(5)),
        "swarm",
        "has 4 managers, and can lose 1 of them, as 3 could",
        "docker node promote gpu-5",
        False,
    ),
    CheckCase(
        "nodes", build_swarm(build_node(1, State="down"), plan=plan_hosts("gpu-1")), "node gpu-1", "is down", "systemctl start docker", True
    ),
    CheckCase(
        "nodes",
        build_swarm(build_node(1), build_node(2, State="down"), plan=plan_hosts("gpu-1")),
        "node gpu-2",
        "is down",
        "docker node rm --force id2",
        False,
    ),
    CheckCase(
        "nodes",
        build_swarm(build_node(1, Availability="drain"), plan=plan_hosts("gpu-1")),
        "node gpu-1",
        "is drained",
        "docker node update --availability active gpu-1",
        True,
    ),
    CheckCase(
        "nodes",
        build_swarm(build_node(1, Hostname="gpu-2", State="down"), build_node(2), plan=plan_hosts("gpu-2")),
        "node gpu-2",
        "is down",
        "docker node rm --force id1",
        False,
    ),
    CheckCase(
        "nodes",
        build_swarm(*build_managers({"State": "down"}, {})),
        "node gpu-1",
        "is down",
        "docker node demote id1 && docker node rm",
        False,
    ),
    CheckCase("nodes", build_swarm(build_node(1, State="unknown")), "node gpu-1", "is unknown", "try again in 30 s", False),
    CheckCase("nodes", build_swarm(build_node(1, Availability="pause")), "node gpu-1", "is paused", "--availability active gpu-1", False),
    CheckCase(
        "nodes",
        build_swarm(build_node(1, Hostname="gpu-2", Availability="drain"), build_node(2)),
        "node gpu-2",
        "is drained",
        "--availability active id1",
        False,
    ),
    CheckCase(
        "hostnames",
        build_swarm(build_node(1, Hostname="gpu-2"), build_node(2)),
        "node gpu-2",
        "2 nodes have this host name",
        "set-hostname",
        False,
    ),
    CheckCase(
        "hostnames",
        build_swarm(build_node(1, Hostname="gpu-2"), build_node(2), plan=plan_hosts("gpu-2")),
        "node gpu-2",
        "their IDs: id1, id2",
        "set-hostname",
        True,
    ),
    CheckCase(
        "hostnames",
        build_swarm(build_node(1, Hostname="gpu-2"), build_node(2), plan=plan_hosts("id2")),
        "node gpu-2",
        "2 nodes have this host name",
        "host",
        False,
    ),
    CheckCase(
        "hostnames",
        build_swarm(build_node(1, Hostname="gpu-2", State="down"), build_node(2), plan=plan_hosts("gpu-2")),
        "node gpu-2",
        "2 nodes have this host name",
        "docker node rm --force id1",
        False,
    ),
    CheckCase(
        "versions", build_swarm(build_node(1, Engine="19.03.15")), "node gpu-1", "engine 19.03.15 is older than 20.10", "install", True
    ),
    CheckCase(
        "versions",
        build_swarm(build_node(1), build_node(2, Engine="19.03.15"), plan=plan_hosts("gpu-1")),
        "node gpu-2",
        "older than 20.10",
        "install",
        False,
    ),
    CheckCase(
        "versions",
        build_swarm(build_node(1, Engine="20.10.24+dfsg1")),
        "swarm",
        "20.10 on gpu-1; 26.1 on gpu-0",
        "docker node update --availability drain",
        False,
    ),
    CheckCase(
        "platforms",
        build_swarm(build_node(1, Architecture="aarch64"), plan=plan_hosts("gpu-1")),
        "node gpu-1",
        "is linux/arm64, and the image registry.lab:5000/swarmtrain:1 is built for linux/amd64",
        "docker buildx build --platform linux/amd64,linux/arm64",
        True,
    ),
    CheckCase(
        "platforms",
        replace(
            build_swarm(build_node(1, Architecture="aarch64"), plan=plan_hosts("gpu-1")), image=PinnedImage("job:1", (("arm64", "linux"),))
        ),
        "rendezvous",
        "runs on a manager, but the image registry.lab:5000/swarmtrain:1 is built for no manager's platform, only for",
        "docker node promote",
        True,
    ),
    CheckCase(
        "platforms",
        build_swarm(build_node(1, Architecture="aarch64"), build_node(2)),
        "swarm",
        "2 linux/amd64, 1 linux/arm64",
        "--platform linux/amd64,linux/arm64",
        False,
    ),
    CheckCase(
        "addresses",
        build_swarm(build_node(1, Addr="127.0.0.1"), plan=plan_hosts("gpu-1")),
        "node gpu-1",
        "advertises 127.0.0.1",
        "docker swarm leave, then docker swarm join --advertise-addr",
        True,
    ),
    CheckCase(
        "addresses",
        build_swarm(build_node(1), build_node(2, Addr="0.0.0.0"), plan=plan_hosts("gpu-1")),  # noqa: S104
        "node gpu-2",
        "0.0.0.0",  # noqa: S104
        "docker swarm leave",
        False,
    ),
    CheckCase(
        "addresses",
        build_swarm(*build_managers({"ManagerAddr": "127.0.0.1:2377"})),
        "node gpu-1",
        "127.0.0.1",
        "docker swarm leave --force",
        True,
    ),
    CheckCase(
        "addresses",
        build_swarm(*build_managers({"ManagerAddr": "[::1]:2377"})),
        "node gpu-1",
        "advertises ::1",
        "docker swarm leave",
        True,
    ),
    CheckCase(
        "addresses",
        replace(build_swarm(), nodes=(build_node(0, manager=True, leader=True, ManagerAddr="127.0.0.1:2377"),)),
        "node gpu-0",
        "127.0.0.1",
        "docker swarm init --advertise-addr",
        False,
    ),
    CheckCase(
        "leftovers",
        build_swarm(terminating_runs=("old",)),
        "run old",
        "is being removed, or was only partially created",
        "swarmtrain down old",
        False,
    ),
    CheckCase(
        "memory",
        build_swarm(plan=plan_hosts(memory="65g")),
        "node gpu-1",
        "has 64.0 GiB of memory, less than runner.docker_config.memory, 65.0 GiB",
        "-o runner.docker_config.memory=65536m",
        True,
    ),
    CheckCase(
        "memory",
        build_swarm(plan=plan_hosts(shm_size="65g")),
        "node gpu-2",
        "less than runner.docker_config.shm_size, 65.0 GiB",
        "-o runner.docker_config.shm_size=65536m",
        True,
    ),
    CheckCase(
        "cores",
        build_swarm(plan=plan_hosts(cpus=8.5)),
        "node gpu-1",
        "has 8 cores, less than runner.docker_config.cpus, 8.5",
        "-o runner.docker_config.cpus=8",
        True,
    ),
    CheckCase(
        "cores",
        build_swarm(build_node(1, Resources={"NanoCPUs": 10**9}), plan=THREE_RANKS),
        "node gpu-1",
        "3 ranks will share 1 core",
        "'gpu-1 slots=1' in runner.hosts",
        False,
    ),
    CheckCase(
        "cores",
        build_swarm(build_node(1, Resources={"NanoCPUs": 10**9}), plan=plan_hosts("gpu-1 slots=3", gpu=GpuMode.visible)),
        "node gpu-1",
        "3 ranks will share 1 core",
        "-o runner.default_gpu_count=1",
        False,
    ),
    CheckCase(
        "counts",
        build_swarm(
            build_node(1, Resources={"GenericResources": build_discrete_resources(4)}),
            plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "declares 4 NVIDIA-GPU without their UUIDs: 2 of them are reserved, but all are visible",
        '"node-generic-resources": ["NVIDIA-GPU=GPU-UUID"]',
        True,
    ),
    CheckCase(
        "counts",
        build_swarm(
            build_node(1, Resources={"GenericResources": build_discrete_resources(2)}),
            plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "declares 2 NVIDIA-GPU without their UUIDs",
        'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"',
        False,
    ),
    CheckCase(
        "resources",
        build_swarm(
            build_node(1, Resources=GPUS),
            services=OTHER_SERVICES,
            tasks=(build_task("other", "node0", "id1", assigned_gpus=build_named_resources("GPU-a")),),
            plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "1 of 2 NVIDIA-GPU free, and the run needs 2: 1 reserved by run other",
        "swarmtrain stop other",
        False,
    ),
    CheckCase(
        "resources",
        build_swarm(
            build_node(1, Resources={"GenericResources": build_discrete_resources(4)}),
            tasks=(build_task("web", "api", "id1", gpus=2), build_task("old", "node0", "id1", gpus=1), build_task("", "x", "id1", gpus=1)),
            terminating_runs=("old",),
            plan=plan_hosts("gpu-1 slots=1", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "2 reserved by stack web, 1 reserved by run old, 1 reserved by a service outside any stack",
        "docker stack services web shows the owner, or swarmtrain down old, or docker service ls",
        False,
    ),
    CheckCase(
        "other-runs",
        build_swarm(
            services=OTHER_SERVICES, tasks=(build_task("other", "node0", "id2"), build_task("other", "node0", "id1")), plan=plan_hosts()
        ),
        "run other",
        "trains on gpu-1, gpu-2 too",
        "swarmtrain stop other",
        False,
    ),
)


def run_checks(cluster: ClusterSnapshot, name: str | None = None) -> list[Finding]:
    return [finding for check in CHECKS.checks if name in (None, check.name) for finding in check.run_check(cluster)]


def test_every_check_has_a_case() -> None:
    assert {case.name for case in CASES} == {check.name for check in CHECKS.checks}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.message}")
def test_a_check_finds_what_it_looks_for(case: CheckCase) -> None:
    found = [finding for finding in run_checks(case.snapshot, case.name) if finding.place == case.place and case.message in finding.message]
    assert [finding.fatal for finding in found] == [case.fatal], run_checks(case.snapshot)
    assert case.hint in (found[0].hint or "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.message}")
def test_every_finding_says_what_to_do_and_why(case: CheckCase) -> None:
    for finding in run_checks(case.snapshot):
        assert finding.hint, finding
        assert finding.why, finding
        assert finding.message[0].islower() or finding.message[0].isdigit(), finding


FULL = {"GenericResources": build_named_resources("GPU-a", "GPU-b"), "NanoCPUs": 10**9}
OWN_SERVICES = (build_service("mine", "node0"), build_service("mine", "node1"))
HEALTHY_SWARMS = {
    "without a plan": build_swarm(),
    "three managers, one of which can run the rendezvous": build_swarm(
        *build_managers({"Architecture": "aarch64"}, {}), build_node(3), plan=plan_hosts("gpu-3")
    ),
    "with a plan that fits just so": build_swarm(plan=plan_hosts("gpu-1 slots=8", memory="64g", shm_size="64g", cpus=8.0)),
    "the oldest engine": replace(build_swarm(), nodes=(build_node(0, manager=True, leader=True, Engine="20.10.0"),)),
    "an image that nobody knows": replace(build_swarm(build_node(1, Architecture="aarch64"), plan=plan_hosts("gpu-1")), image=None),
    "an image for several kinds": replace(
        build_swarm(build_node(1, Architecture="aarch64"), plan=plan_hosts("gpu-1")),
        image=PinnedImage("job:1", (("amd64", "linux"), ("arm64", "linux"))),
    ),
    "machines of another kind that the plan leaves alone": build_swarm(
        build_node(1), build_node(2, Architecture="aarch64"), plan=plan_hosts("gpu-1")
    ),
    "ranks with a GPU each share a core": build_swarm(build_node(1, Resources=FULL), plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve)),
    "its own tasks": build_swarm(
        build_node(1, Resources=FULL),
        services=OWN_SERVICES,
        tasks=(build_task("mine", "node0", "id1", gpus=2, assigned_gpus=build_named_resources("GPU-a", "GPU-b")),),
        plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "tasks that are over, and that have no node yet": build_swarm(
        build_node(1, Resources=FULL),
        services=OTHER_SERVICES,
        tasks=(build_task("other", "node0", "id1", gpus=2, state="complete"), build_task("other", "node0", "", gpus=2, state="pending")),
        plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "another run's node elsewhere, and its rendezvous": build_swarm(
        services=OTHER_SERVICES,
        tasks=(build_task("other", "node0", "id2"), build_task("other", "rendezvous", "id1")),
        plan=plan_hosts("gpu-1"),
    ),
    "other things on the machine": build_swarm(
        services=(build_service("web", "api", role=None),), tasks=(build_task("web", "api", "id1"),), plan=plan_hosts("gpu-1")
    ),
    "resources of another kind held": build_swarm(
        build_node(1, Resources=FULL),
        services=(build_service("web", "api", role=None),),
        tasks=(build_task("web", "api", "id1", assigned_gpus=build_discrete_resources(2, "SSD")),),
        plan=plan_hosts("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "fewer GPUs than wanted, which the launcher tells": build_swarm(
        build_node(1, Resources=FULL), plan=plan_hosts("gpu-1 slots=3", gpu=GpuMode.reserve)
    ),
    "a leader that old engines show without its address": replace(
        build_swarm(),
        nodes=(build_node(0, manager=True, leader=True, Addr="0.0.0.0"), build_node(1)),  # noqa: S104
    ),
    "a node that has not reported its resources yet": build_swarm(
        {**build_node(1), "Description": {"Platform": {}, "Resources": {}, "Engine": {}}}
    ),
}


@pytest.mark.parametrize("snapshot", HEALTHY_SWARMS.values(), ids=HEALTHY_SWARMS.keys())
def test_nothing_is_found_on_a_sound_swarm(snapshot: ClusterSnapshot) -> None:
    assert run_checks(snapshot) == []


@pytest.mark.parametrize(
    ("holder", "mode", "needed"),
    [("other", GpuMode.reserve, True), ("mine", GpuMode.reserve, True), ("other", GpuMode.visible, False), ("", GpuMode.reserve, False)],
)
def test_a_probe_knows_that_gpus_are_reserved(holder: str, mode: GpuMode, needed: bool) -> None:
    """GPUs of the plan's own run count too: the probe runs at the same time."""
    tasks = (build_task(holder, "node0", "id1", assigned_gpus=build_named_resources("GPU-a")),) if holder else ()
    snapshot = build_swarm(build_node(1, Resources=GPUS), services=OTHER_SERVICES, tasks=tasks, plan=plan_hosts("gpu-1 slots=2", gpu=mode))
    assert needs_reserved_gpus(snapshot) is needed
