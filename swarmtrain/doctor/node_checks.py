"""Checks on each node, from the facts that its probe collected inside the job's container: GPUs, mounts, disk space."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from swarmtrain.doctor.probe_results import CHECKS, NodeFacts, ProbeResults
from swarmtrain.launchers.base import Finding
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan
from swarmtrain.render.mounts import find_save_dir_mount

_MAX_CLOCK_SKEW_SECONDS = 0.5
_MIN_OPEN_FILES = 4096
_MIN_SHM_BYTES = 1 << 30
_MIN_MEMORY_PER_RANK_BYTES = 1 << 29
_MIN_SCRATCH_BYTES = 1 << 30
_MIN_SAVE_DIR_BYTES = 5 << 30
_SHARED_DISK_HINT = "mount a shared file system on all nodes with runner.docker_config.docker_mounts, or set trainer.save_dir_shared: false"
_OWN_DISK_HINT = "set runner.docker_config.docker_mounts: [[checkpoints, /workspace/runs]] to use a volume on each node"
_PULLING_PATTERN = re.compile("^preparing|no such image|pull", re.IGNORECASE)


@CHECKS("probe", "every node starts the job's container, and the container reaches the coordinator")
def _check_probe_started(results: ProbeResults) -> Iterator[Finding]:
    if results.failure_reason:
        yield Finding(
            f"run {results.plan.run}",
            results.failure_reason,
            "fix it, then run swarmtrain doctor CONFIG again",
            why="the job would fail with the same error",
        )
        return
    for node in results.plan.nodes:
        if node.name not in results.nodes and node not in _list_nodes_without_image(results):
            state = results.service_states.get(node.name) or "no task state is known"
            hint = f"run swarmtrain deploy CONFIG to see what it waits for, or docker service ps --no-trunc {results.plan.run}_{node.name}"
            yield Finding(
                results.describe_node(node.name),
                f"its probe did not report: {state}",
                hint,
                why="whatever prevents the probe from starting also prevents the job",
            )


@CHECKS("image", "every node has the job's image with the same digest")
def _check_image_present(results: ProbeResults) -> Iterator[Finding]:
    if nodes_without_image := _list_nodes_without_image(results):
        ready_count = len(results.plan.nodes) - len(nodes_without_image)
        states = "; ".join(f"{results.describe_node(node.name)}: {results.service_states[node.name]}" for node in nodes_without_image)
        image = results.image or results.plan.config.runner.docker_config.docker_container
        message = f"{ready_count} of {len(results.plan.nodes)} nodes have it. {states}"
        yield Finding(
            f"image {image}",
            message,
            f"docker pull {image} on that node shows the reason",
            why="a node starts only after it has pulled the image",
        )


@CHECKS("container", "script, config, secrets, torch and mounts are present in each container")
def _check_container_problems(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        for problem in facts["problems"]:
            yield Finding(
                results.describe_node(name),
                problem,
                "fix it on that node, then run swarmtrain doctor CONFIG again",
                why="the job would fail immediately with the same error",
            )


@CHECKS("clock", "all clocks agree")
def _check_clocks(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        if abs(facts["clock"]) > _MAX_CLOCK_SKEW_SECONDS:
            skew = f"{abs(facts['clock']):.1f} s {'ahead of' if facts['clock'] > 0 else 'behind'}"
            why = "log lines and events of several nodes are ordered by timestamp, and certificates are checked against the clock"
            yield Finding(
                results.describe_node(name), f"its clock is {skew} the manager's", "run timedatectl set-ntp true", fatal=False, why=why
            )


@CHECKS("shm", "/dev/shm is large enough")  # noqa: S108  # only mentioned, not written to
def _check_shm_size(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        if facts["shm"] < _MIN_SHM_BYTES and facts["slots"] > 1:
            message = f"/dev/shm has only {facts['shm'] >> 20} MiB for {facts['slots']} ranks"  # noqa: S108
            why = "data loaders and NCCL pass data through it, and are killed by SIGBUS when it is full"
            yield Finding(results.describe_node(name), message, "set runner.docker_config.shm_size: 2147483648", fatal=False, why=why)


@CHECKS("limits", "processes can open enough files, and lock memory where RDMA needs it")
def _check_ulimits(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        limits = facts["limits"]
        if 0 <= limits["nofile"] < _MIN_OPEN_FILES:
            hint = 'add to its /etc/docker/daemon.json: "default-ulimits": {"nofile": {"Name": "nofile", "Soft": 1048576, "Hard": 1048576}}'
            why = "each peer and each data loader worker needs several open files"
            yield Finding(results.describe_node(name), f"processes may open only {limits['nofile']} files", hint, fatal=False, why=why)
        if facts["infiniband"] and limits["memlock"] != -1:
            hint = 'add to its /etc/docker/daemon.json: "default-ulimits": {"memlock": {"Name": "memlock", "Soft": -1, "Hard": -1}}'
            message = f"has {', '.join(facts['infiniband'])}, but processes can lock only {limits['memlock'] >> 10} KiB"
            yield Finding(
                results.describe_node(name), message, hint, fatal=False, why="RDMA registers its buffers, which locks them in memory"
            )


@CHECKS("disk-space", "disks and memory have enough free space")
def _check_free_space(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        if facts["scratch"] < _MIN_SCRATCH_BYTES:
            message = f"/tmp has {_format_gibibytes(facts['scratch'])} left"  # noqa: S108
            yield Finding(
                results.describe_node(name),
                message,
                "run docker system prune on that node",
                fatal=False,
                why="logs and caches are written there",
            )
        if facts["memory"] < _MIN_MEMORY_PER_RANK_BYTES * facts["slots"]:
            message = f"has {_format_gibibytes(facts['memory'])} of memory left for {facts['slots']} ranks"
            yield Finding(
                results.describe_node(name),
                message,
                "run docker stats on that node to see what uses the memory",
                fatal=False,
                why="when memory runs out, the OOM killer kills a process",
            )
        for mount in facts["mounts"]:
            if mount["target"] == _get_save_dir_mount_target(results.plan) and mount["free"] < _MIN_SAVE_DIR_BYTES:
                message = f"{mount['target']} has {_format_gibibytes(mount['free'])} left"
                hint = f"df -h {mount['target']}; lower trainer.keep_checkpoints to keep fewer checkpoints"
                yield Finding(results.describe_node(name), message, hint, fatal=False, why="checkpoints are written there")


@CHECKS("shared", "save_dir is on a shared file system, or on a separate disk per node, as configured")
def _check_shared_storage(results: ProbeResults) -> Iterator[Finding]:
    target = _get_save_dir_mount_target(results.plan)
    if len(results.plan.nodes) < 2 or results.plan.config.trainer.save_dir is None:
        return
    shared = results.plan.config.trainer.save_dir_shared
    if target is None:
        why = (
            "each node would write its checkpoint shards into its container only"
            if shared
            else "a node's checkpoints would be lost with its container"
        )
        yield Finding("config trainer.save_dir", "is not inside a mount", _SHARED_DISK_HINT if shared else _OWN_DISK_HINT, why=why)
        return
    for name, mount in _iterate_mounts(results):
        if mount["target"] == target and not mount["writable"]:
            yield _describe_unwritable_mount(results, name, mount)
        elif (
            mount["target"] == target
            and shared
            and (
                missing_writers := sorted(
                    _list_resolved_nodes(results, name) & _list_nodes_with_writable_mount(results, target) - set(mount["visible_nodes"])
                )
            )
        ):
            message = f"{target} is a different disk on this node: what {', '.join(missing_writers)} wrote is missing"
            yield Finding(
                results.describe_node(name),
                message,
                _SHARED_DISK_HINT,
                why="a checkpoint is complete only if all its files are in one place",
            )
    sharing_nodes = [name for name, mount in _iterate_mounts(results) if mount["target"] == target and set(mount["visible_nodes"]) - {name}]
    if sharing_nodes and not shared:
        message = f"{target} is not a separate disk on {', '.join(sharing_nodes)}: it contains files that other nodes wrote"
        yield Finding(
            "config trainer.save_dir",
            message,
            "set trainer.save_dir_shared: true",
            why="each node writes a complete checkpoint to its own disk",
        )


def _describe_unwritable_mount(results: ProbeResults, node_name: str, mount: NodeFacts) -> Finding:
    """Return the finding for a mount that the job cannot write to; if its owner is the cause, the finding names the owner and the fix."""
    owner, user, host = (
        mount.get("owner", ""),
        results.nodes[node_name].get("user", ""),
        results.describe_node(node_name).partition(" on ")[2],
    )
    message, why = (
        f"{mount['target']} cannot be written: {mount.get('write_error', '')}".rstrip(": "),
        "all nodes write checkpoints together",
    )
    if not owner or not user or owner == user:
        return Finding(results.describe_node(node_name), message, f"run mount on {host} to see whether it is mounted read-only", why=why)
    source = next((source for source, target in results.plan.config.runner.docker_config.docker_mounts if target == mount["target"]), "")
    user_setting = f"runner.docker_config.user: {owner}"
    chown_command = f"chown -R {user} {source}, on {host}"
    hint = chown_command if owner.startswith("0:") else f"{user_setting}; or {chown_command}"
    return Finding(results.describe_node(node_name), f"{message}; it belongs to {owner}, and the ranks run as {user}", hint, why=why)


@CHECKS("data", "mounts have the same content on all nodes")
def _check_data_mounts(results: ProbeResults) -> Iterator[Finding]:
    for target in sorted({mount["target"] for _, mount in _iterate_mounts(results)} - {_get_save_dir_mount_target(results.plan)}):
        contents = {
            name: (mount["content_digest"], mount["entries"]) for name, mount in _iterate_mounts(results) if mount["target"] == target
        }
        common_content, _ = Counter(contents.values()).most_common(1)[0]
        for name, content in contents.items():
            if content != common_content:
                message = f"{target} has different content on this node: {content[1]} entries, but the others have {common_content[1]}"
                hint = "copy the data again, or mount the same file system on all nodes"
                yield Finding(
                    results.describe_node(name), message, hint, why="ranks that read different data train on inconsistent batches, or fail"
                )


@CHECKS("torch", "torch is the same on all nodes")
def _check_torch_versions(results: ProbeResults) -> Iterator[Finding]:
    for key, library in (("torch", "torch"), ("cuda", "CUDA"), ("nccl_version", "NCCL")):
        versions_by_node = {name: facts.get(key) for name, facts in results.collective_results.items() if facts.get(key)}
        if len(set(versions_by_node.values())) > 1:
            versions_text = ", ".join(f"{name} {version}" for name, version in versions_by_node.items())
            yield Finding(
                "image",
                f"{library} differs: {versions_text}",
                "run swarmtrain image build . --push and deploy again",
                why="different versions cannot communicate",
            )


def _list_nodes_without_image(results: ProbeResults) -> list[PlannedNode]:
    """Return the planned nodes whose probe did not report because the engine was still pulling the image, or failed to."""
    silent_nodes = [node for node in results.plan.nodes if node.name not in results.nodes]
    return [node for node in silent_nodes if _PULLING_PATTERN.search(results.service_states.get(node.name, ""))]


def _format_gibibytes(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _iterate_mounts(results: ProbeResults) -> Iterator[tuple[str, NodeFacts]]:
    for name, facts in results.nodes.items():
        for mount in facts["mounts"]:
            yield name, mount


def _list_resolved_nodes(results: ProbeResults, node_name: str) -> set[str]:
    """Return the nodes whose marker files `node_name` could see: the node itself, and the peers whose host names it had resolved."""
    return {node_name, *(peer for peer, seconds in results.nodes[node_name]["names"].items() if seconds is not None)}


def _list_nodes_with_writable_mount(results: ProbeResults, target: str) -> set[str]:
    return {name for name, mount in _iterate_mounts(results) if mount["target"] == target and mount["writable"]}


def _get_save_dir_mount_target(plan: Plan) -> str | None:
    """Return the container path of the mount that contains save_dir; None if no mount contains it."""
    mount = find_save_dir_mount(plan.config)
    return mount[1] if mount else None
