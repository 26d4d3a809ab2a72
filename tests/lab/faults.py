"""Everything that may happen to a run, a row each: how it strikes, and how many finished steps it may cost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from scene import SAVE_INTERVAL, Scene

from swarmtrain.lab import fabric

NONE = 0
INTERVAL = SAVE_INTERVAL
STATES = ("replicated", "divided")
DISKS = ("shared", "own")
_QUIET: Callable[[str], None] = lambda line: None  # noqa: E731


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run."""

    name: str
    strike: Callable[[Scene], None]
    """Does it, and heals what does not heal by itself."""
    replicated: int
    """Steps that it may cost where each rank has the whole state."""
    divided: int
    """The same where each rank has but a part of it."""
    usual: tuple[tuple[str, str], ...] = ()
    """States and disks with which it belongs to the usual tests."""
    disks: tuple[str, ...] = DISKS
    """With which save_dir it can happen."""

    def may_lose(self, state: str) -> int:
        """Return the most steps that a run with this state may make again."""
        return self.replicated if state == "replicated" else self.divided


def _kill_rank(scene: Scene) -> None:
    scene.signal("node1", "rank", signal.SIGKILL)


def _kill_agent(scene: Scene) -> None:
    scene.signal("node1", "agent", signal.SIGKILL)


def _kill_container(scene: Scene) -> None:
    scene.kill_containers("node2")


def _kill_board(scene: Scene) -> None:
    scene.docker("node0", "kill", "--signal", "KILL", scene.container("node0", "rendezvous"))


def _lose(node: str, seconds: float) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        scene.lab.kill(node, say=_QUIET)
        time.sleep(seconds)
        scene.lab.start(node, say=_QUIET)

    return strike


def _hang(scene: Scene) -> None:
    scene.signal("node1", "rank", signal.SIGSTOP)


def _cut(seconds: float) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        scene.lab.cut("node2", say=_QUIET)
        time.sleep(seconds)
        scene.lab.heal("node2", say=_QUIET)

    return strike


def _deafen(scene: Scene) -> None:
    """What node2 says arrives; what is said to it does not: a queue of which every packet is too large for."""
    part = fabric.namespace(scene.lab.name, "fabric")
    drop = ["tbf", "rate", "8kbit", "burst", "10", "limit", "10"]
    subprocess.run(["tc", "-n", part, "qdisc", "replace", "dev", "node2", "root", *drop], check=True)
    time.sleep(20)
    scene.lab.heal("node2", say=_QUIET)


def _slow(scene: Scene) -> None:
    scene.lab.slow("node2", "10mbit", say=_QUIET)
    scene.reach(scene.step + 20)
    scene.lab.heal("node2", say=_QUIET)


def _fill_disk(scene: Scene) -> None:
    """No byte is left when the next checkpoint is due."""
    ballast = scene.lab.shared / "ballast"
    left = os.statvfs(ballast.parent)
    try:
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)
        scene.reach(scene.step + SAVE_INTERVAL + 20)
    finally:
        ballast.unlink()


def _lose_folder(scene: Scene) -> None:
    folder = scene.save_dirs[-1]
    aside = folder.with_name(f"{scene.run}-gone")
    folder.rename(aside)
    scene.reach(scene.step + SAVE_INTERVAL + 20)
    _delete(folder)
    aside.rename(folder)


def _damage(how: Callable[[Path], None]) -> Callable[[Scene], None]:
    """Damage every copy of the newest checkpoint, and let all nodes read it."""

    def strike(scene: Scene) -> None:
        scene.reach(2 * SAVE_INTERVAL + 10)
        for folder in scene.save_dirs:
            how(sorted(folder.glob("step-*"))[-1])
        scene.kill_containers("node0", "node1", "node2")

    return strike


def _largest(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.iterdir()), key=lambda path: path.stat().st_size)


def _truncate(checkpoint: Path) -> None:
    os.truncate(_largest(checkpoint), 1000)


def _flip(checkpoint: Path) -> None:
    with _largest(checkpoint).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


def _half_rename(checkpoint: Path) -> None:
    """As a file system that is no better may leave it: the folder under its name, and not all in it."""
    (checkpoint / "manifest.json").unlink()


def _delete(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _empty_a_disk(scene: Scene) -> None:
    scene.reach(SAVE_INTERVAL + 10)
    scene.kill_containers("node2")
    _delete(scene.save_dirs[-1])


def _two_at_once(scene: Scene) -> None:
    scene.signal("node1", "rank", signal.SIGKILL)
    scene.kill_containers("node2")


def _while_saving(scene: Scene) -> None:
    before = _content(scene.save_dirs)
    scene.until(lambda: bool(_content(scene.save_dirs) - before), "no checkpoint is begun")
    scene.kill_containers("node1")


def _while_loading(scene: Scene) -> None:
    fences = [folder / "fence" for folder in scene.save_dirs]
    before = _content(fences)
    scene.kill_containers("node1")
    scene.until(lambda: bool(_content(fences) - before), "no new world is there")
    scene.signal("node2", "rank", signal.SIGKILL)


def _content(folders: Iterable[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.iterdir()}


def _while_meeting(scene: Scene) -> None:
    scene.kill_containers("node1")
    time.sleep(2)
    scene.kill_containers("node2")


def _while_scaling(scene: Scene) -> None:
    scale = scene.swarmtrain("scale", scene.run, "--nodes", "2")
    time.sleep(1)
    scene.kill_containers("node1")
    assert scale.wait(240) == 0
    assert scene.swarmtrain("scale", scene.run, "--nodes", "3").wait(240) == 0


def _all_at_once(scene: Scene) -> None:
    scene.kill_containers("node0", "node1", "node2")


def _scale(scene: Scene) -> None:
    assert scene.swarmtrain("scale", scene.run, "--nodes", "2").wait(240) == 0
    scene.reach(scene.step + 10)
    assert scene.swarmtrain("scale", scene.run, "--nodes", "3").wait(240) == 0


def _drain(scene: Scene) -> None:
    scene.docker("node0", "node", "update", "--availability", "drain", "node2")
    scene.reach(scene.step + 10)
    scene.docker("node0", "node", "update", "--availability", "active", "node2")


def _force(scene: Scene) -> None:
    scene.docker("node0", "service", "update", "--detach", "--force", f"{scene.run}_node1")


_FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), Path("/usr/lib/faketime"))
_CLOCK = Path(__file__).with_name("clock.c")


def _be_an_hour_ahead(scene: Scene) -> None:
    _preload(scene, _FAKETIME, "FAKETIME=+1h")


def _jump_an_hour_ahead(scene: Scene) -> None:
    library = scene.lab.shared / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(_CLOCK)], check=True)
    token = scene.token
    _preload(scene, Path("/mnt/shared", library.name))
    scene.until(lambda: scene.token > token, "node1 does not come back")
    scene.reach(scene.step + 20)
    scene.docker("node1", "exec", scene.container("node1"), "touch", "/tmp/the-clock-has-jumped")


def _preload(scene: Scene, library: Path, *environment: str) -> None:
    """Start node1 anew with a library of its machine preloaded."""
    mount = ["--mount-add", f"type=bind,source={library},target=/opt/clock.so,readonly"]
    variables = [word for variable in ("LD_PRELOAD=/opt/clock.so", *environment) for word in ("--env-add", variable)]
    scene.docker("node0", "service", "update", "--detach", *mount, *variables, f"{scene.run}_node1")


FAULTS = (
    Fault("a rank is killed", _kill_rank, NONE, INTERVAL),
    Fault("torchrun is killed", _kill_agent, NONE, INTERVAL),
    Fault("a container is killed", _kill_container, NONE, INTERVAL, usual=(("divided", "own"),)),
    Fault("the notice board is killed", _kill_board, NONE, NONE),
    Fault("a machine dies, and comes back after 30 s", _lose("node2", 30), NONE, INTERVAL),
    Fault("the manager's machine dies, and comes back after 5 s", _lose("node0", 5), INTERVAL, INTERVAL),
    Fault("a rank hangs", _hang, NONE, INTERVAL, usual=(("replicated", "own"),)),
    Fault("a link is cut for 5 s", _cut(5), NONE, INTERVAL),
    Fault("a link is cut for 60 s", _cut(60), NONE, INTERVAL),
    Fault("a link is cut one way for 20 s", _deafen, NONE, INTERVAL),
    Fault("a link is slowed to 10 Mbit", _slow, NONE, NONE),
    Fault("the disk is full", _fill_disk, NONE, NONE),
    Fault("save_dir vanishes", _lose_folder, NONE, NONE),
    Fault("the newest checkpoint is truncated, all containers killed", _damage(_truncate), 2 * INTERVAL, 2 * INTERVAL),
    Fault("a bit of the newest checkpoint flips, all containers killed", _damage(_flip), 2 * INTERVAL, 2 * INTERVAL),
    Fault("the newest checkpoint is renamed in part, all containers killed", _damage(_half_rename), 2 * INTERVAL, 2 * INTERVAL),
    Fault("the newest checkpoint is deleted, all containers killed", _damage(_delete), 2 * INTERVAL, 2 * INTERVAL),
    Fault("a rank and a container are killed at once", _two_at_once, NONE, INTERVAL),
    Fault("a container is killed while a checkpoint is written", _while_saving, NONE, INTERVAL),
    Fault("a rank is killed while a checkpoint is read", _while_loading, NONE, INTERVAL),
    Fault("a container is killed while nodes meet", _while_meeting, NONE, INTERVAL),
    Fault("a container is killed while the run is scaled", _while_scaling, NONE, INTERVAL),
    Fault("a container is killed, and its disk is lost", _empty_a_disk, NONE, INTERVAL, disks=("own",), usual=(("replicated", "own"),)),
    Fault("all containers are killed at once", _all_at_once, INTERVAL, INTERVAL),
    Fault("the run is scaled to 2 nodes, and to 3 again", _scale, NONE, NONE),
    Fault("a node is drained, and made active again", _drain, NONE, NONE),
    Fault("a service is updated by force", _force, NONE, NONE),
    Fault("a node comes back with a clock that is an hour wrong", _be_an_hour_ahead, NONE, NONE),
    Fault("a node's clock jumps an hour ahead", _jump_an_hour_ahead, NONE, NONE),
)
