"""All faults that the chaos tests inject: how each is injected, and how many completed steps it may cost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from chaos_run import SAVE_INTERVAL, ChaosRun

from swarmtrain.lab import network

NO_STEPS = 0
ONE_INTERVAL = SAVE_INTERVAL
_ROUND_STEPS = 20
_LEARNERS = ("topology.learners=3", f"diloco.inner_steps={_ROUND_STEPS}", "diloco.quantization=int8")
STATES = ("replicated", "sharded")
DISKS = ("shared", "node-local")
_DISCARD: Callable[[str], None] = lambda line: None  # noqa: E731


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a run."""

    name: str
    inject: Callable[[ChaosRun], None]
    """Injects the fault, and repairs what does not recover by itself."""
    max_lost_replicated: int
    """Maximum number of steps recomputed if each rank has the complete state."""
    max_lost_sharded: int
    """The same if the state is sharded over the ranks."""
    default_cases: tuple[tuple[str, str], ...] = ()
    """Pairs of state and disk that are tested by default."""
    disks: tuple[str, ...] = DISKS
    """The kinds of save_dir with which the fault is possible."""
    states: tuple[str, ...] = STATES
    """The ways to keep the state with which the fault is possible."""
    settings: tuple[str, ...] = ()
    """Config overrides of the run."""

    def get_max_lost_steps(self, state: str) -> int:
        """Return the maximum number of steps that a run with this state may recompute."""
        return self.max_lost_replicated if state == "replicated" else self.max_lost_sharded


def _kill_rank(scene: ChaosRun) -> None:
    scene.send_signal("node1", "rank", signal.SIGKILL)


def _kill_agent(scene: ChaosRun) -> None:
    scene.send_signal("node1", "agent", signal.SIGKILL)


def _kill_container(scene: ChaosRun) -> None:
    scene.kill_containers("node2")


def _kill_coordinator(scene: ChaosRun) -> None:
    scene.run_docker("node0", "kill", "--signal", "KILL", scene.find_container("node0", "rendezvous"))


def _power_off(node: str, seconds: float) -> Callable[[ChaosRun], None]:
    def inject(scene: ChaosRun) -> None:
        scene.lab.power_off_node(node, report_progress=_DISCARD)
        time.sleep(seconds)
        scene.lab.power_on_node(node, report_progress=_DISCARD)

    return inject


def _stop_rank(scene: ChaosRun) -> None:
    scene.send_signal("node1", "rank", signal.SIGSTOP)


def _partition_node(seconds: float) -> Callable[[ChaosRun], None]:
    def inject(scene: ChaosRun) -> None:
        scene.lab.partition_node("node2", report_progress=_DISCARD)
        time.sleep(seconds)
        scene.lab.reconnect_node("node2", report_progress=_DISCARD)

    return inject


def _cut_incoming_link(scene: ChaosRun) -> None:
    """Drop packets to node2 but not from it: a token bucket queue whose bucket is smaller than any packet."""
    part = network.get_namespace_name(scene.lab.name, "bridge")
    drop = ["tbf", "rate", "8kbit", "burst", "10", "limit", "10"]
    subprocess.run(["tc", "-n", part, "qdisc", "replace", "dev", "node2", "root", *drop], check=True)
    time.sleep(20)
    scene.lab.reconnect_node("node2", report_progress=_DISCARD)


def _slow_link(scene: ChaosRun) -> None:
    scene.lab.limit_node_bandwidth("node2", "10mbit", report_progress=_DISCARD)
    scene.wait_for_step(scene.step + 20)
    scene.lab.reconnect_node("node2", report_progress=_DISCARD)


def _fill_disk(scene: ChaosRun) -> None:
    """Fill the shared disk, so that no byte is free when the next checkpoint is due."""
    ballast = scene.lab.shared_disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            for size in (2**20, 2**12):  # until it is full: the run writes, too, so its free space is not known in advance
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        scene.wait_for_step(scene.step + SAVE_INTERVAL + 20)
    finally:
        ballast.unlink()


def _remove_save_dir(scene: ChaosRun) -> None:
    folder = scene.save_dirs[-1]
    moved = folder.with_name(f"{scene.name}-gone")
    folder.rename(moved)
    scene.wait_for_step(scene.step + SAVE_INTERVAL + 20)
    _delete_folder(folder)
    moved.rename(folder)


def _damage_newest_checkpoint(damage: Callable[[Path], None]) -> Callable[[ChaosRun], None]:
    """Damage every copy of the newest checkpoint, then kill all containers, so that all nodes load a checkpoint."""

    def inject(scene: ChaosRun) -> None:
        scene.wait_for_step(2 * SAVE_INTERVAL + 10)
        for folder in scene.save_dirs:
            damage(sorted(folder.glob("step-*"))[-1])
        scene.kill_containers("node0", "node1", "node2")

    return inject


def _find_largest_file(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.iterdir()), key=lambda path: path.stat().st_size)


def _truncate_checkpoint(checkpoint: Path) -> None:
    os.truncate(_find_largest_file(checkpoint), 1000)


def _flip_bit(checkpoint: Path) -> None:
    with _find_largest_file(checkpoint).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


def _remove_manifest(checkpoint: Path) -> None:
    """Leave what a file system without atomic rename may leave: the folder has its final name, but not all of its files."""
    (checkpoint / "manifest.json").unlink()


def _delete_folder(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _empty_disk(scene: ChaosRun) -> None:
    scene.wait_for_step(SAVE_INTERVAL + 10)
    scene.kill_containers("node2")
    _delete_folder(scene.save_dirs[-1])


def _kill_rank_and_container(scene: ChaosRun) -> None:
    scene.send_signal("node1", "rank", signal.SIGKILL)
    scene.kill_containers("node2")


def _kill_while_saving(scene: ChaosRun) -> None:
    before = _list_content(scene.save_dirs)
    scene.wait_until(lambda: bool(_list_content(scene.save_dirs) - before), "no checkpoint is begun")
    scene.kill_containers("node1")


def _kill_while_loading(scene: ChaosRun) -> None:
    fences = [folder / "fence" for folder in scene.save_dirs]
    before = _list_content(fences)
    scene.kill_containers("node1")
    scene.wait_until(lambda: bool(_list_content(fences) - before), "no new world is there")
    scene.send_signal("node2", "rank", signal.SIGKILL)


def _list_content(folders: Iterable[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.iterdir()}


def _kill_during_rendezvous(scene: ChaosRun) -> None:
    scene.kill_containers("node1")
    time.sleep(2)
    scene.kill_containers("node2")


def _kill_while_scaling(scene: ChaosRun) -> None:
    scale = scene.start_command("scale", scene.name, "--nodes", "2")
    time.sleep(1)
    scene.kill_containers("node1")
    assert scale.wait(240) == 0
    assert scene.start_command("scale", scene.name, "--nodes", "3").wait(240) == 0


def _kill_all_containers(scene: ChaosRun) -> None:
    scene.kill_containers("node0", "node1", "node2")


def _scale_down_and_up(scene: ChaosRun) -> None:
    assert scene.start_command("scale", scene.name, "--nodes", "2").wait(240) == 0
    scene.wait_for_step(scene.step + 10)
    assert scene.start_command("scale", scene.name, "--nodes", "3").wait(240) == 0


def _drain_node(scene: ChaosRun) -> None:
    scene.run_docker("node0", "node", "update", "--availability", "drain", "node2")
    scene.wait_for_step(scene.step + 10)
    scene.run_docker("node0", "node", "update", "--availability", "active", "node2")


def _force_update(scene: ChaosRun) -> None:
    scene.run_docker("node0", "service", "update", "--detach", "--force", f"{scene.name}_node1")


def _kill_during_outer_step(scene: ChaosRun) -> None:
    """The link makes the exchange take seconds, and a step not: it sends a few numbers only."""
    scene.wait_until(lambda: _ROUND_STEPS // 4 < scene.step % _ROUND_STEPS < _ROUND_STEPS // 2, "no round is at its middle")
    scene.lab.limit_node_bandwidth("node2", "1mbit", report_progress=_DISCARD)
    scene.wait_until(lambda: scene.step % _ROUND_STEPS == 0, "no round has ended")
    time.sleep(0.5)
    assert scene.step % _ROUND_STEPS == 0, "the outer step is over already"
    scene.kill_containers("node1")
    scene.lab.reconnect_node("node2", report_progress=_DISCARD)


def _kill_while_fragment_in_flight(scene: ChaosRun) -> None:
    interval = _ROUND_STEPS // 2
    scene.wait_until(lambda: 0 < scene.step % interval < interval // 2, "no exchange has started")
    scene.kill_containers("node1")


def _kill_while_shares_change(scene: ChaosRun) -> None:
    """Slow a node, wait for the first step with other shares, and kill another node."""
    docker_update = ["update", "--cpus", "0.1", scene.find_container("node2")]
    scene.run_docker("node2", *docker_update)
    scene.wait_until(lambda: len(_list_newest_shares(scene)) > 1, "the shares do not change")
    scene.kill_containers("node1")


def _list_newest_shares(scene: ChaosRun) -> set[int]:
    """Return the different numbers of samples that ranks had in the newest step that all of them have completed."""
    lines = scene.audit.final_lines
    return {len(line.samples) for line in lines[max(step for step in lines if len(lines[step]) == max(map(len, lines.values())))]}


_FAKETIME_LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), Path("/usr/lib/faketime"))
_CLOCK_SOURCE = Path(__file__).with_name("clock.c")


def _set_clock_ahead(scene: ChaosRun) -> None:
    _preload_library(scene, _FAKETIME_LIBRARY, "FAKETIME=+1h")


def _jump_clock_ahead(scene: ChaosRun) -> None:
    library = scene.lab.shared_disk / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(_CLOCK_SOURCE)], check=True)
    generation = scene.generation
    _preload_library(scene, Path("/mnt/shared", library.name))
    scene.wait_until(lambda: scene.generation > generation, "node1 does not come back")
    scene.wait_for_step(scene.step + 20)
    scene.run_docker("node1", "exec", scene.find_container("node1"), "touch", "/tmp/the-clock-has-jumped")


def _preload_library(scene: ChaosRun, library: Path, *environment: str) -> None:
    """Restart node1 with a preloaded library of its machine."""
    mount = ["--mount-add", f"type=bind,source={library},target=/opt/clock.so,readonly"]
    variables = [word for variable in ("LD_PRELOAD=/opt/clock.so", *environment) for word in ("--env-add", variable)]
    scene.run_docker("node0", "service", "update", "--detach", *mount, *variables, f"{scene.name}_node1")


FAULTS = (
    Fault("a rank is killed", _kill_rank, NO_STEPS, ONE_INTERVAL),
    Fault("torchrun is killed", _kill_agent, NO_STEPS, ONE_INTERVAL),
    Fault("a container is killed", _kill_container, NO_STEPS, ONE_INTERVAL, default_cases=(("sharded", "node-local"),)),
    Fault("the coordinator is killed", _kill_coordinator, NO_STEPS, NO_STEPS),
    Fault("a machine dies, and comes back after 30 s", _power_off("node2", 30), NO_STEPS, ONE_INTERVAL),
    Fault("the manager's machine dies, and comes back after 5 s", _power_off("node0", 5), ONE_INTERVAL, ONE_INTERVAL),
    Fault("a rank hangs", _stop_rank, NO_STEPS, ONE_INTERVAL, default_cases=(("replicated", "node-local"),)),
    Fault("a link is cut for 5 s", _partition_node(5), NO_STEPS, ONE_INTERVAL),
    Fault("a link is cut for 60 s", _partition_node(60), NO_STEPS, ONE_INTERVAL),
    Fault("a link is cut one way for 20 s", _cut_incoming_link, NO_STEPS, ONE_INTERVAL),
    Fault("a link is slowed to 10 Mbit", _slow_link, NO_STEPS, NO_STEPS),
    Fault("the disk is full", _fill_disk, NO_STEPS, NO_STEPS),
    Fault("save_dir vanishes", _remove_save_dir, NO_STEPS, NO_STEPS),
    Fault(
        "the newest checkpoint is truncated, all containers killed",
        _damage_newest_checkpoint(_truncate_checkpoint),
        2 * ONE_INTERVAL,
        2 * ONE_INTERVAL,
    ),
    Fault(
        "a bit of the newest checkpoint flips, all containers killed",
        _damage_newest_checkpoint(_flip_bit),
        2 * ONE_INTERVAL,
        2 * ONE_INTERVAL,
    ),
    Fault(
        "the newest checkpoint is renamed in part, all containers killed",
        _damage_newest_checkpoint(_remove_manifest),
        2 * ONE_INTERVAL,
        2 * ONE_INTERVAL,
    ),
    Fault(
        "the newest checkpoint is deleted, all containers killed",
        _damage_newest_checkpoint(_delete_folder),
        2 * ONE_INTERVAL,
        2 * ONE_INTERVAL,
    ),
    Fault("a rank and a container are killed at once", _kill_rank_and_container, NO_STEPS, ONE_INTERVAL),
    Fault("a container is killed while a checkpoint is written", _kill_while_saving, NO_STEPS, ONE_INTERVAL),
    Fault("a rank is killed while a checkpoint is read", _kill_while_loading, NO_STEPS, ONE_INTERVAL),
    Fault("a container is killed during rendezvous", _kill_during_rendezvous, NO_STEPS, ONE_INTERVAL),
    Fault("a container is killed while the run is scaled", _kill_while_scaling, NO_STEPS, ONE_INTERVAL),
    Fault(
        "a container is killed, and its disk is lost",
        _empty_disk,
        NO_STEPS,
        ONE_INTERVAL,
        disks=("node-local",),
        default_cases=(("replicated", "node-local"),),
    ),
    Fault("all containers are killed at once", _kill_all_containers, ONE_INTERVAL, ONE_INTERVAL),
    Fault("the run is scaled to 2 nodes, and to 3 again", _scale_down_and_up, NO_STEPS, NO_STEPS),
    Fault("a node is drained, and made active again", _drain_node, NO_STEPS, NO_STEPS),
    Fault("a service is updated by force", _force_update, NO_STEPS, NO_STEPS),
    Fault("a node comes back with a clock that is an hour wrong", _set_clock_ahead, NO_STEPS, NO_STEPS),
    Fault("a node's clock jumps an hour ahead", _jump_clock_ahead, NO_STEPS, NO_STEPS),
    Fault(
        "a learner's container is killed during an outer step (DiLoCo)",
        _kill_during_outer_step,
        ONE_INTERVAL,
        ONE_INTERVAL,
        states=("sharded",),
        settings=_LEARNERS,
    ),
    Fault(
        "a learner's container is killed while a fragment is exchanged (DiLoCo)",
        _kill_while_fragment_in_flight,
        ONE_INTERVAL,
        ONE_INTERVAL,
        states=("sharded",),
        settings=(*_LEARNERS, "diloco.fragments=2", f"diloco.overlap={_ROUND_STEPS // 2 - 2}", "diloco.mixing=0.5"),
    ),
    Fault(
        "a container is killed while micro batches are reassigned by speed",
        _kill_while_shares_change,
        NO_STEPS,
        NO_STEPS,
        states=("replicated",),
        settings=("topology.micro_batch_assignment=by_speed", "topology.micro_batch_reassignment_interval=1"),
    ),
)
