"""Each check on a swarm that has what it looks for, and sound swarms on which all are silent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from swarms import discrete, managers, named, node, plan, service, swarm, task

from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.capacity import must_wait
from swarmtrain.doctor.cluster import CHECKS, Cluster
from swarmtrain.images import Pinned
from swarmtrain.launchers.base import Finding

GPUS = {"GenericResources": named("GPU-a", "GPU-b")}
OTHER = (service("other", "node0"), service("other", "rendezvous", role="rendezvous"))
THREE_RANKS = plan("gpu-1 slots=3")


@dataclass(frozen=True)
class Case:
    """A swarm on which the check `name` says `message` of `place`."""

    name: str
    seen: Cluster
    place: str
    message: str
    hint: str
    fatal: bool


CASES = (
    Case("quorum", replace(swarm(), nodes=managers({}, {}, {})), "swarm", "none of its managers leads", "--force-new-cluster", True),
    Case("quorum", swarm(*managers({"Reachability": "unreachable"}, {})), "node gpu-1", "do not reach", "docker node demote gpu-1", False),
    Case("quorum", swarm(*managers({"Reachability": "unreachable"})), "node gpu-1", "do not reach", "systemctl start docker", True),
    Case("quorum", swarm(*managers({})), "swarm", "has 2 managers, and can lose none of them", "docker node demote gpu-1", False),
    Case(
        "quorum",
        swarm(*managers({}, {}, {}), node(4, State="down"), node(5)),
        "swarm",
        "has 4 managers, and can lose 1 of them, as 3 could",
        "docker node promote gpu-5",
        False,
    ),
    Case("nodes", swarm(node(1, State="down"), plan=plan("gpu-1")), "node gpu-1", "is down", "systemctl start docker", True),
    Case("nodes", swarm(node(1), node(2, State="down"), plan=plan("gpu-1")), "node gpu-2", "is down", "docker node rm --force id2", False),
    Case(
        "nodes",
        swarm(node(1, Availability="drain"), plan=plan("gpu-1")),
        "node gpu-1",
        "is drained",
        "docker node update --availability active gpu-1",
        True,
    ),
    Case(
        "nodes",
        swarm(node(1, Hostname="gpu-2", State="down"), node(2), plan=plan("gpu-2")),
        "node gpu-2",
        "is down",
        "docker node rm --force id1",
        False,
    ),
    Case("nodes", swarm(*managers({"State": "down"}, {})), "node gpu-1", "is down", "docker node demote id1 && docker node rm", False),
    Case("nodes", swarm(node(1, Availability="pause")), "node gpu-1", "is paused", "--availability active gpu-1", False),
    Case(
        "nodes",
        swarm(node(1, Hostname="gpu-2", Availability="drain"), node(2)),
        "node gpu-2",
        "is drained",
        "--availability active id1",
        False,
    ),
    Case("hostnames", swarm(node(1, Hostname="gpu-2"), node(2)), "node gpu-2", "2 nodes have this host name", "set-hostname", False),
    Case(
        "hostnames",
        swarm(node(1, Hostname="gpu-2"), node(2), plan=plan("gpu-2")),
        "node gpu-2",
        "with the ids id1, id2",
        "set-hostname",
        True,
    ),
    Case(
        "hostnames", swarm(node(1, Hostname="gpu-2"), node(2), plan=plan("id2")), "node gpu-2", "2 nodes have this host name", "host", False
    ),
    Case(
        "hostnames",
        swarm(node(1, Hostname="gpu-2", State="down"), node(2), plan=plan("gpu-2")),
        "node gpu-2",
        "2 nodes have this host name",
        "docker node rm --force id1",
        False,
    ),
    Case("versions", swarm(node(1, Engine="19.03.15")), "node gpu-1", "engine 19.03.15 is older than 20.10", "install", True),
    Case("versions", swarm(node(1), node(2, Engine="19.03.15"), plan=plan("gpu-1")), "node gpu-2", "older than 20.10", "install", False),
    Case(
        "versions",
        swarm(node(1, Engine="20.10.24+dfsg1")),
        "swarm",
        "20.10 on gpu-1; 26.1 on gpu-0",
        "docker node update --availability drain",
        False,
    ),
    Case(
        "platforms",
        swarm(node(1, Architecture="aarch64"), plan=plan("gpu-1")),
        "node gpu-1",
        "is linux/arm64, and the image registry.lab:5000/swarmtrain:1 is made for linux/amd64",
        "docker buildx build --platform linux/amd64,linux/arm64",
        True,
    ),
    Case(
        "platforms",
        replace(swarm(node(1, Architecture="aarch64"), plan=plan("gpu-1")), image=Pinned("job:1", (("arm64", "linux"),))),
        "rendezvous",
        "it runs on a manager, and the image registry.lab:5000/swarmtrain:1 is made for none of them",
        "docker node promote",
        True,
    ),
    Case(
        "platforms",
        swarm(node(1, Architecture="aarch64"), node(2)),
        "swarm",
        "2 linux/amd64, 1 linux/arm64",
        "--platform linux/amd64,linux/arm64",
        False,
    ),
    Case(
        "addresses",
        swarm(node(1, Addr="127.0.0.1"), plan=plan("gpu-1")),
        "node gpu-1",
        "has the address 127.0.0.1",
        "docker swarm leave, then docker swarm join --advertise-addr",
        True,
    ),
    Case("addresses", swarm(node(1), node(2, Addr="0.0.0.0"), plan=plan("gpu-1")), "node gpu-2", "0.0.0.0", "docker swarm leave", False),  # noqa: S104
    Case("addresses", swarm(*managers({"ManagerAddr": "127.0.0.1:2377"})), "node gpu-1", "127.0.0.1", "docker swarm leave --force", True),
    Case("addresses", swarm(*managers({"ManagerAddr": "[::1]:2377"})), "node gpu-1", "has the address ::1", "docker swarm leave", True),
    Case(
        "addresses",
        replace(swarm(), nodes=(node(0, manager=True, leader=True, ManagerAddr="127.0.0.1:2377"),)),
        "node gpu-0",
        "127.0.0.1",
        "docker swarm init --advertise-addr",
        False,
    ),
    Case("leftovers", swarm(leaving=("old",)), "run old", "is going down, or was left half made", "swarmtrain down old", False),
    Case(
        "memory",
        swarm(plan=plan(memory="65g")),
        "node gpu-1",
        "has 64.0 GiB of memory, less than runner.docker_config.memory, 65.0 GiB",
        "-o runner.docker_config.memory=65536m",
        True,
    ),
    Case(
        "memory",
        swarm(plan=plan(shm_size="65g")),
        "node gpu-2",
        "less than runner.docker_config.shm_size, 65.0 GiB",
        "-o runner.docker_config.shm_size=65536m",
        True,
    ),
    Case(
        "cores",
        swarm(plan=plan(cpus=8.5)),
        "node gpu-1",
        "has 8 cores, less than runner.docker_config.cpus, 8.5",
        "-o runner.docker_config.cpus=8",
        True,
    ),
    Case(
        "cores",
        swarm(node(1, Resources={"NanoCPUs": 10**9}), plan=THREE_RANKS),
        "node gpu-1",
        "3 ranks will share 1 core",
        "'gpu-1 slots=1' in runner.hosts",
        False,
    ),
    Case(
        "cores",
        swarm(node(1, Resources={"NanoCPUs": 10**9}), plan=plan("gpu-1 slots=3", gpu=GpuMode.visible)),
        "node gpu-1",
        "3 ranks will share 1 core",
        "-o runner.default_gpu_count=1",
        False,
    ),
    Case(
        "counts",
        swarm(node(1, Resources={"GenericResources": discrete(4)}), plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve)),
        "node gpu-1",
        "declares 4 NVIDIA-GPU, and not which: 2 of them are reserved, and all are seen",
        '"node-generic-resources": ["NVIDIA-GPU=GPU-UUID"]',
        True,
    ),
    Case(
        "counts",
        swarm(node(1, Resources={"GenericResources": discrete(2)}), plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve)),
        "node gpu-1",
        "declares 2 NVIDIA-GPU, and not which",
        'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"',
        False,
    ),
    Case(
        "resources",
        swarm(
            node(1, Resources=GPUS),
            services=OTHER,
            tasks=(task("other", "node0", "id1", given=named("GPU-a")),),
            plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "has 2 NVIDIA-GPU, 1 of them free, and 2 wanted: run other holds 1; the run waits until run other lets go",
        "swarmtrain stop other",
        False,
    ),
    Case(
        "resources",
        swarm(
            node(1, Resources={"GenericResources": discrete(4)}),
            tasks=(task("web", "api", "id1", gpus=2), task("old", "node0", "id1", gpus=1), task("", "x", "id1", gpus=1)),
            leaving=("old",),
            plan=plan("gpu-1 slots=1", gpu=GpuMode.reserve),
        ),
        "node gpu-1",
        "stack web holds 2, run old holds 1, a service of no stack holds 1; the run waits until stack web or run old",
        "docker stack services web shows whose it is, or swarmtrain down old, or docker service ls",
        False,
    ),
    Case(
        "crowd",
        swarm(services=OTHER, tasks=(task("other", "node0", "id2"), task("other", "node0", "id1")), plan=plan()),
        "run other",
        "trains on gpu-1, gpu-2 too",
        "swarmtrain stop other",
        False,
    ),
)


def told(seen: Cluster, name: str | None = None) -> list[Finding]:
    return [finding for check in CHECKS.all if name in (None, check.name) for finding in check.find(seen)]


def test_every_check_has_a_case() -> None:
    assert {case.name for case in CASES} == {check.name for check in CHECKS.all}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.message}")
def test_a_check_finds_what_it_looks_for(case: Case) -> None:
    found = [finding for finding in told(case.seen, case.name) if finding.place == case.place and case.message in finding.message]
    assert [finding.fatal for finding in found] == [case.fatal], told(case.seen)
    assert case.hint in (found[0].hint or "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.message}")
def test_every_finding_says_what_to_do_and_why(case: Case) -> None:
    for finding in told(case.seen):
        assert finding.hint, finding
        assert finding.why, finding
        assert finding.message[0].islower() or finding.message[0].isdigit(), finding


FULL = {"GenericResources": named("GPU-a", "GPU-b"), "NanoCPUs": 10**9}
MINE = (service("mine", "node0"), service("mine", "node1"))
SOUND = {
    "without a plan": swarm(),
    "three managers, one of which can run the rendezvous": swarm(*managers({"Architecture": "aarch64"}, {}), node(3), plan=plan("gpu-3")),
    "with a plan that fits just so": swarm(plan=plan("gpu-1 slots=8", memory="64g", shm_size="64g", cpus=8.0)),
    "the oldest engine": replace(swarm(), nodes=(node(0, manager=True, leader=True, Engine="20.10.0"),)),
    "an image that nobody knows": replace(swarm(node(1, Architecture="aarch64"), plan=plan("gpu-1")), image=None),
    "an image for several kinds": replace(
        swarm(node(1, Architecture="aarch64"), plan=plan("gpu-1")), image=Pinned("job:1", (("amd64", "linux"), ("arm64", "linux")))
    ),
    "machines of another kind that the plan leaves alone": swarm(node(1), node(2, Architecture="aarch64"), plan=plan("gpu-1")),
    "ranks with a GPU each share a core": swarm(node(1, Resources=FULL), plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve)),
    "its own tasks": swarm(
        node(1, Resources=FULL),
        services=MINE,
        tasks=(task("mine", "node0", "id1", gpus=2, given=named("GPU-a", "GPU-b")),),
        plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "tasks that are over, and that have no node yet": swarm(
        node(1, Resources=FULL),
        services=OTHER,
        tasks=(task("other", "node0", "id1", gpus=2, state="complete"), task("other", "node0", "", gpus=2, state="pending")),
        plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "another run's node elsewhere, and its rendezvous": swarm(
        services=OTHER, tasks=(task("other", "node0", "id2"), task("other", "rendezvous", "id1")), plan=plan("gpu-1")
    ),
    "other things on the machine": swarm(
        services=(service("web", "api", role=None),), tasks=(task("web", "api", "id1"),), plan=plan("gpu-1")
    ),
    "resources of another kind held": swarm(
        node(1, Resources=FULL),
        services=(service("web", "api", role=None),),
        tasks=(task("web", "api", "id1", given=discrete(2, "SSD")),),
        plan=plan("gpu-1 slots=2", gpu=GpuMode.reserve),
    ),
    "fewer GPUs than wanted, which the launcher tells": swarm(node(1, Resources=FULL), plan=plan("gpu-1 slots=3", gpu=GpuMode.reserve)),
    "a leader that old engines show without its address": replace(
        swarm(),
        nodes=(node(0, manager=True, leader=True, Addr="0.0.0.0"), node(1)),  # noqa: S104
    ),
    "a node that has told nothing of itself yet": swarm({**node(1), "Description": {"Platform": {}, "Resources": {}, "Engine": {}}}),
}


@pytest.mark.parametrize("seen", SOUND.values(), ids=SOUND.keys())
def test_nothing_is_found_on_a_sound_swarm(seen: Cluster) -> None:
    assert told(seen) == []


@pytest.mark.parametrize(
    ("holder", "mode", "waits"),
    [("other", GpuMode.reserve, True), ("mine", GpuMode.reserve, True), ("other", GpuMode.visible, False), ("", GpuMode.reserve, False)],
)
def test_a_probe_that_would_have_to_wait_for_gpus_is_known(holder: str, mode: GpuMode, waits: bool) -> None:
    """Those that the plan's own run holds count too: the probe is a run beside it."""
    tasks = (task(holder, "node0", "id1", given=named("GPU-a")),) if holder else ()
    seen = swarm(node(1, Resources=GPUS), services=OTHER, tasks=tasks, plan=plan("gpu-1 slots=2", gpu=mode))
    assert must_wait(seen) is waits
