"""What each node has for the job, as its probe saw it from inside the job's container."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from swarmtrain.doctor.probed import CHECKS, Facts, Probed
from swarmtrain.launchers.base import Finding
from swarmtrain.plan import Plan, PlannedNode
from swarmtrain.render.mounts import save_mount

_CLOCK = 0.5
_FILES = 4096
_SHM = 1 << 30
_MEMORY_PER_RANK = 1 << 29
_SCRATCH = 1 << 30
_ROOM = 5 << 30
_SHARED = "mount a disk that all nodes share: runner.docker_config.docker_mounts; without one: trainer.save_dir_shared: false"
_OWN = "runner.docker_config.docker_mounts: [[checkpoints, /workspace/runs]] is a volume on each node"
_GETTING = re.compile("^preparing|no such image|pull", re.IGNORECASE)


@CHECKS("probe", "every node starts the job's container, and it can speak to the notice board")
def _missing(seen: Probed) -> Iterator[Finding]:
    if seen.verdict:
        yield Finding(f"run {seen.plan.run}", seen.verdict, "mend it, then: swarmtrain doctor CONFIG", why="the job ends with the same")
        return
    for node in seen.plan.nodes:
        if node.name not in seen.nodes and node not in _imageless(seen):
            state = seen.states.get(node.name) or "it was not heard of"
            hint = (
                f"swarmtrain deploy CONFIG; it says what it waits for, and so does docker service ps --no-trunc {seen.plan.run}_{node.name}"
            )
            yield Finding(
                seen.place(node.name), f"its probe told nothing: {state}", hint, why="what keeps a probe from starting keeps the job"
            )


@CHECKS("image", "every node has the job's image, under one digest")
def _image(seen: Probed) -> Iterator[Finding]:
    if without := _imageless(seen):
        there = len(seen.plan.nodes) - len(without)
        states = "; ".join(f"{seen.place(node.name)}: {seen.states[node.name]}" for node in without)
        image = seen.image or seen.plan.config.runner.docker_config.docker_container
        message = f"{there} of {len(seen.plan.nodes)} nodes have it. {states}"
        yield Finding(f"image {image}", message, f"docker pull {image}, on that node, says more", why="a node starts when it has its image")


@CHECKS("container", "script, config, secrets, torch and mounts are there in each container")
def _problems(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        for problem in facts["problems"]:
            yield Finding(
                seen.place(name), problem, "mend it there, then: swarmtrain doctor CONFIG", why="the job ends at once with the same"
            )


@CHECKS("clock", "all clocks agree")
def _clock(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        if abs(facts["clock"]) > _CLOCK:
            ahead = f"{abs(facts['clock']):.1f} s {'ahead of' if facts['clock'] > 0 else 'behind'}"
            why = "lines and events of several nodes are put in order by their times, and certificates are checked by them"
            yield Finding(seen.place(name), f"its clock is {ahead} the manager's", "timedatectl set-ntp true", fatal=False, why=why)


@CHECKS("shm", "/dev/shm is large enough")  # noqa: S108  # spoken of, not written to
def _shm(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        if facts["shm"] < _SHM and facts["slots"] > 1:
            message = f"/dev/shm has {facts['shm'] >> 20} MiB for {facts['slots']} ranks"  # noqa: S108
            why = "data loaders and NCCL pass data through it, and die of SIGBUS when it is full"
            yield Finding(seen.place(name), message, "runner.docker_config.shm_size: 2147483648", fatal=False, why=why)


@CHECKS("limits", "processes may open enough files, and lock memory where RDMA wants that")
def _limits(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        limits = facts["limits"]
        if 0 <= limits["nofile"] < _FILES:
            hint = 'in its /etc/docker/daemon.json: "default-ulimits": {"nofile": {"Name": "nofile", "Soft": 1048576, "Hard": 1048576}}'
            why = "each peer and each worker of a data loader takes several"
            yield Finding(seen.place(name), f"processes may open {limits['nofile']} files", hint, fatal=False, why=why)
        if facts["infiniband"] and limits["memlock"] != -1:
            hint = 'in its /etc/docker/daemon.json: "default-ulimits": {"memlock": {"Name": "memlock", "Soft": -1, "Hard": -1}}'
            message = f"has {', '.join(facts['infiniband'])}, and processes may lock {limits['memlock'] >> 10} KiB"
            yield Finding(seen.place(name), message, hint, fatal=False, why="RDMA registers its buffers, which locks them in memory")


@CHECKS("room", "disks and memory have room")
def _room(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        if facts["scratch"] < _SCRATCH:
            message = f"/tmp has {_gib(facts['scratch'])} left"  # noqa: S108
            yield Finding(seen.place(name), message, "docker system prune, there", fatal=False, why="logs and caches go there")
        if facts["memory"] < _MEMORY_PER_RANK * facts["slots"]:
            message = f"has {_gib(facts['memory'])} of memory left for {facts['slots']} ranks"
            yield Finding(
                seen.place(name), message, "docker stats, there, shows who has it", fatal=False, why="the kernel kills the largest"
            )
        for mount in facts["mounts"]:
            if mount["target"] == _save_mount(seen.plan) and mount["free"] < _ROOM:
                message = f"{mount['target']} has {_gib(mount['free'])} left"
                hint = f"df -h {mount['target']}; trainer.keep_checkpoints keeps fewer"
                yield Finding(seen.place(name), message, hint, fatal=False, why="checkpoints go there")


@CHECKS("shared", "save_dir is a disk that takes the checkpoints of all nodes")
def _shared(seen: Probed) -> Iterator[Finding]:
    target = _save_mount(seen.plan)
    if len(seen.plan.nodes) < 2 or seen.plan.config.trainer.save_dir is None:
        return
    shared = seen.plan.config.trainer.save_dir_shared
    if target is None:
        why = "each node would write its part into its own container" if shared else "what a node keeps would go with its container"
        yield Finding("config trainer.save_dir", "lies in no mount", _SHARED if shared else _OWN, why=why)
        return
    for name, mount in _each_mount(seen):
        if mount["target"] == target and not mount["writable"]:
            yield _unwritable(seen, name, mount)
        elif mount["target"] == target and shared and (unseen := sorted(_met(seen, name) & _writers(seen, target) - set(mount["seen"]))):
            message = f"{target} is another disk here: what {', '.join(unseen)} wrote is not in it"
            yield Finding(seen.place(name), message, _SHARED, why="a checkpoint is whole only where all its parts lie together")
    seeing = [name for name, mount in _each_mount(seen) if mount["target"] == target and set(mount["seen"]) - {name}]
    if seeing and not shared:
        message = f"{target} is no disk of its own on {', '.join(seeing)}: it has what others wrote"
        yield Finding(
            "config trainer.save_dir", message, "trainer.save_dir_shared: true", why="each node writes a whole checkpoint to its own"
        )


def _unwritable(seen: Probed, name: str, mount: Facts) -> Finding:
    """Return who may write there, if it is a matter of that, and the line with which the ranks are that one."""
    owner, user, host = mount.get("owner", ""), seen.nodes[name].get("user", ""), seen.place(name).partition(" on ")[2]
    message, why = f"{mount['target']} cannot be written: {mount.get('refused', '')}".rstrip(": "), "all nodes write checkpoints together"
    if not owner or not user or owner == user:
        return Finding(seen.place(name), message, f"mount, on {host}, shows whether it may be written at all", why=why)
    source = next((source for source, target in seen.plan.config.runner.docker_config.docker_mounts if target == mount["target"]), "")
    theirs = f"runner.docker_config.user: {owner}"
    ours = f"chown -R {user} {source}, on {host}"
    hint = ours if owner.startswith("0:") else f"{theirs}; or {ours}"
    return Finding(seen.place(name), f"{message}; it belongs to {owner}, and the ranks are {user}", hint, why=why)


@CHECKS("data", "mounts show the same on all nodes")
def _data(seen: Probed) -> Iterator[Finding]:
    for target in sorted({mount["target"] for _, mount in _each_mount(seen)} - {_save_mount(seen.plan)}):
        shown = {name: (mount["content"], mount["entries"]) for name, mount in _each_mount(seen) if mount["target"] == target}
        usual, _ = Counter(shown.values()).most_common(1)[0]
        for name, there in shown.items():
            if there != usual:
                message = f"{target} holds something else here: {there[1]} entries, where the others have {usual[1]}"
                hint = "copy it anew, or mount the same disk everywhere"
                yield Finding(seen.place(name), message, hint, why="ranks that read different data train on nonsense, or stop")


@CHECKS("torch", "torch is the same everywhere")
def _torch(seen: Probed) -> Iterator[Finding]:
    for key, what in (("torch", "torch"), ("cuda", "CUDA"), ("nccl_version", "NCCL")):
        found = {name: facts.get(key) for name, facts in seen.together.items() if facts.get(key)}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} {version}" for name, version in found.items())
            yield Finding("image", f"{what} differs: {told}", "swarmtrain image build . --push, and deploy again", why="they cannot talk")


def _imageless(seen: Probed) -> list[PlannedNode]:
    """Return the nodes that told nothing, and whose engine was still getting the image, or could not."""
    silent = [node for node in seen.plan.nodes if node.name not in seen.nodes]
    return [node for node in silent if _GETTING.search(seen.states.get(node.name, ""))]


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _each_mount(seen: Probed) -> Iterator[tuple[str, Facts]]:
    for name, facts in seen.nodes.items():
        for mount in facts["mounts"]:
            yield name, mount


def _met(seen: Probed, name: str) -> set[str]:
    """Return the nodes that had left their marks when `name` looked: itself, and those it had met."""
    return {name, *(peer for peer, seconds in seen.nodes[name]["names"].items() if seconds is not None)}


def _writers(seen: Probed, target: str) -> set[str]:
    return {name for name, mount in _each_mount(seen) if mount["target"] == target and mount["writable"]}


def _save_mount(plan: Plan) -> str | None:
    """Return where the mount that save_dir lies in is in the container, None if it lies in none."""
    mount = save_mount(plan.config)
    return mount[1] if mount else None
