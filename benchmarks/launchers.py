"""The same job of three nodes by every launcher, from the command to its first optimizer step, beside the same tools by hand; and
what is left of starts that are interrupted.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

from benchmarks.labs import lab
from benchmarks.measure import BUILD, SWARMTRAIN, Row, Sample, Unavailable, in_turns, say, until
from benchmarks.runs import distribute
from swarmtrain import process
from swarmtrain.errors import ProcessError
from swarmtrain.lab import REGISTRY, Lab

_RUNS = 3
_STARTS = 102
_INTERRUPTED_WITHIN = 6.0
_NODES = ("node0", "node1", "node2")
_RUN = "launch"
_IMAGE = f"{REGISTRY}/swarmtrain:bench"
_ON_NODES = Path("/mnt/shared") / _RUN
_SCRIPT, _STEPPED, _ENOUGH = "first_step.py", "stepped", "enough"
_STATE = BUILD / "launchers-state"
"""Where runs are kept: all nodes see it, as they see a home under Slurm."""
_ENDS_WITHIN = 120.0
_FORGOTTEN_WITHIN = 10.0
"""An engine keeps the shell of a container that has ended for a moment."""
_TRAIN = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    (folder / "new").write_text(str(time.time()))
    (folder / "new").replace(folder / "stepped")
while not (folder / "enough").exists():
    time.sleep(0.1)
dist.barrier()
dist.destroy_process_group()
"""
_RUNNER = {
    "hosts": [f"{node} slots=1" for node in _NODES],
    "script": _SCRIPT,
    "stop_grace": 10,
    "env": {"OMP_NUM_THREADS": "1"},
    "docker_config": {"docker_container": _IMAGE, "docker_mounts": [["/mnt/shared", "/mnt/shared"]]},
    "slurm": {"time": "10", "cpus_per_node": 1},
}
_IN_CONTAINER = f"-e OMP_NUM_THREADS=1 -v /mnt/shared:/mnt/shared --entrypoint torchrun {_IMAGE}"
_BY_HAND = {
    "swarm": "docker stack deploy -c {stack} launch",
    "docker": (
        "docker network create launch && for i in 0 1 2; do "
        f"docker run --rm --name node$i --network launch {_IN_CONTAINER} {{torchrun}} --node-rank=$i --master-addr=node0 {{script}} & "
        "done; wait; docker network rm launch"
    ),
    "local": "for i in 0 1 2; do {python} {torchrun} --node-rank=$i --master-addr=127.0.0.1 {script} & done; wait",
    "pdsh": "pdsh -R ssh -w node0,node1,node2 'OMP_NUM_THREADS=1 {python} {torchrun} --node-rank=%n --master-addr={first} {script}'",
    "pdsh_docker": (
        "pdsh -R ssh -w node0,node1,node2 "
        f"'docker run --rm --network host {_IN_CONTAINER} {{torchrun}} --node-rank=%n --master-addr={{first}} {{script}}'"
    ),
    "slurm": (
        "sbatch --wait --quiet --nodes=3 --ntasks-per-node=1 --output=/dev/null --wrap "
        "'srun sh -c \"exec {python} {torchrun} --node-rank=\\$SLURM_NODEID --master-addr={first} {script}\"'"
    ),
}
"""For each launcher the shell's line that starts the same job without it, and returns when the job has ended or, of a stack, before."""
_TOOLS = {"swarm": "docker stack deploy", "docker": "docker run", "pdsh_docker": "pdsh … docker run", "pdsh": "pdsh", "slurm": "sbatch"}


def first_steps() -> Iterator[Row]:
    """Seconds to the first step, ours and by hand in turns."""
    with _place() as place:
        for kind in _BY_HAND:
            mine, theirs = in_turns(_RUNS, partial(_ours, place, kind), partial(_by_hand, place, kind))
            say(f"{kind}: ours {mine.median:.1f} s, by hand {theirs.median:.1f} s")
            what = f"`swarmtrain deploy`, `runner_type: {kind}`, to the first optimizer step of 3 nodes; at most 1 s more is wished for"
            by_hand = f"`{_TOOLS[kind]}`, `torchrun` and the same script by hand" if kind in _TOOLS else "three times `torchrun` by hand"
            yield Row(f"launchers/{kind}", what, "s", mine, theirs, by_hand)


def interrupted() -> Iterator[Row]:
    """Starts that get a Ctrl-C in their first seconds, each at another moment: what is left, after `down` where it is asked for."""
    starts = _STARTS // len(_BY_HAND)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here, as in the background, is ignored by all it starts
    with _place() as place:
        for kind in _BY_HAND:
            left = 0
            for start in range(starts):
                left += len(found := _interrupt(place, kind, _INTERRUPTED_WITHIN * (start + 0.5) / starts))
                for each in found:
                    say(f"{kind}: left is {each}")
            what = f"{starts} deploys, `runner_type: {kind}`, interrupted within {_INTERRUPTED_WITHIN:g} s: what is left of them"
            yield Row(f"interrupted/{kind}", what, "things", Sample.of([float(left)]), limit=0)


@contextmanager
def _place() -> Iterator[Lab]:
    """Give a lab in which every launcher works, and whose engines have the image."""
    with lab(len(_NODES), parts=("swarm", "ssh", "slurm")) as place:
        distribute(place)
        yield place


def _ours(place: Lab, kind: str) -> float:
    folder = _prepared(place, kind)
    seconds = _to_first_step([*SWARMTRAIN, "deploy", "config.yml", "--name", _RUN], folder, _env(place))
    process.run([*SWARMTRAIN, "down", _RUN], env=_env(place))
    return seconds


def _by_hand(place: Lab, kind: str) -> float:
    folder, env = _prepared(place, kind), _env(place)
    there = folder if kind == "local" else _ON_NODES
    words = {
        "python": f"{shlex.quote(sys.executable)} -m torch.distributed.run",
        "torchrun": f"--nnodes={len(_NODES)} --nproc-per-node=1 --master-port=29511",
        "script": f"{there / _SCRIPT} {there}",
        "first": place.status()[0].address,
        "stack": str(_stack() if kind == "swarm" else ""),
    }
    seconds = _to_first_step(["sh", "-c", _BY_HAND[kind].format(**words)], folder, env)
    if kind == "swarm":
        process.run(["docker", "stack", "rm", _RUN], env=env)
        listed = ["docker", "network", "ls", "-q", "--filter", f"name={_RUN}_"]
        until(lambda: not process.run(listed, env=env).strip(), "the stack's network stays")
    return seconds


def _to_first_step(argv: list[str], folder: Path, env: dict[str, str]) -> float:
    """Run a command, let the job end after its first step, and return how long that took. Raises ProcessError, Unavailable."""
    begun = time.time()
    program = process.start(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until(lambda: (folder / _STEPPED).exists() or bool(program.poll()), "the first step", every=0.02)
        (folder / _ENOUGH).touch()
        _, said = program.communicate(timeout=_ENDS_WITHIN)
    except BaseException:
        program.terminate()
        say(program.communicate()[1].decode())
        raise
    if program.returncode:
        raise ProcessError(shlex.join(argv), program.returncode, said.decode())
    return float((folder / _STEPPED).read_text()) - begun


def _interrupt(place: Lab, kind: str, after: float) -> list[str]:
    """Interrupt a deploy after so many seconds, and return what is left of it."""
    folder, env = _prepared(place, kind), _env(place)
    argv = [*SWARMTRAIN, "deploy", "config.yml", "--name", _RUN]
    deploy = process.start(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(after)
    deploy.send_signal(signal.SIGINT)
    _, said = deploy.communicate(timeout=_ENDS_WITHIN)
    if b"nothing of it is left" not in said:
        with contextlib.suppress(ProcessError):  # interrupted before it was anything
            process.run([*SWARMTRAIN, "down", _RUN], env=env)
    with contextlib.suppress(Unavailable):
        until(lambda: not _programs() and not _things(place), "nothing", seconds=_FORGOTTEN_WITHIN)
    return [*_programs(), *_things(place)]


def _programs() -> list[str]:
    """Return the command lines of all that the run has, on whichever machine of the lab."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            told = f"SWARMTRAIN_RUN={_RUN}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if told or f"/{_RUN}/" in line:
                found.append(line)
    return found


def _things(place: Lab) -> list[str]:
    """Return what engines and Slurm have of a run."""
    found = process.run(["squeue", "--noheader"], env=place.env()).splitlines()
    for node in _NODES:
        docker = ["docker", "-H", place.docker_host(node)]
        for listed in (["ps", "-a", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"]):
            found += [name for name in process.run([*docker, *listed]).splitlines() if name.startswith(_RUN)]
    services = process.run(["docker", "service", "ls", "--format", "{{.Name}}"], env=place.env())
    return [*found, *services.splitlines()]


def _prepared(place: Lab, kind: str) -> Path:
    """Return the job's folder, as this machine sees it: in it are script and config, and nothing of an earlier job."""
    folder = _folder(place)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(_STATE, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)  # containers have a user of their own
    (folder / _SCRIPT).write_text(_TRAIN)
    there = folder if kind == "local" else _ON_NODES
    runner = {**_RUNNER, "runner_type": kind, "script_args": [str(there)]}
    (folder / "config.yml").write_text(yaml.safe_dump({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    return folder


def _stack() -> Path:
    """Write the stack of three services that a person would write, each with torchrun."""
    nodes = {
        node: {
            "image": _IMAGE,
            "hostname": node,
            "entrypoint": ["torchrun"],
            "command": [
                *("--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=node0", "--master-port=29511"),
                *(str(_ON_NODES / _SCRIPT), str(_ON_NODES)),
            ],
            "environment": {"OMP_NUM_THREADS": "1"},
            "volumes": ["/mnt/shared:/mnt/shared"],
            "networks": ["training"],
            "deploy": {
                "placement": {"constraints": [f"node.hostname=={node}"]},
                "endpoint_mode": "dnsrr",
                "restart_policy": {"condition": "on-failure"},
            },
        }
        for rank, node in enumerate(_NODES)
    }
    path = BUILD / "launchers.yml"
    path.write_text(yaml.safe_dump({"version": "3.8", "services": nodes, "networks": {"training": {"driver": "overlay"}}}))
    return path


def _env(place: Lab) -> dict[str, str]:
    return {**place.env(), "XDG_STATE_HOME": str(_STATE), "OMP_NUM_THREADS": "1"}


def _folder(place: Lab) -> Path:
    return place.shared / _RUN
