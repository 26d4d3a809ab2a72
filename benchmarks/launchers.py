"""Benchmarks of every launcher: time to a three-node job's first optimizer step, with swarmtrain and with the launcher's own commands.

Also count the objects that remain after an interrupted start.
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

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import (
    BUILD,
    SWARMTRAIN_ARGV,
    BenchmarkRow,
    BenchmarkUnavailableError,
    Sample,
    measure_in_turns,
    print_progress,
    wait_until,
)
from benchmarks.run_startup import provide_image
from swarmtrain import process
from swarmtrain.errors import ProcessError
from swarmtrain.lab import REGISTRY_ADDRESS, Lab

_REPEATS = 3
_INTERRUPTED_STARTS = 102
_INTERRUPT_WINDOW_SECONDS = 6.0
_NODES = ("node0", "node1", "node2")
_RUN_NAME = "launch"
_IMAGE = f"{REGISTRY_ADDRESS}/swarmtrain:bench"
_NODE_JOB_FOLDER = Path("/mnt/shared") / _RUN_NAME
_SCRIPT_NAME, _STEP_MARKER, _STOP_MARKER = "first_step.py", "stepped", "enough"
_STATE_FOLDER = BUILD / "launchers-state"
"""Folder of the runs: shared by all nodes, like a home directory under Slurm."""
_EXIT_TIMEOUT_SECONDS = 120.0
_CLEANUP_TIMEOUT_SECONDS = 10.0
"""An engine still lists a container for a moment after it has exited."""
_TRAINING_SCRIPT = """
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
_RUNNER_CONFIG = {
    "hosts": [f"{node} slots=1" for node in _NODES],
    "script": _SCRIPT_NAME,
    "stop_grace": 10,
    "env": {"OMP_NUM_THREADS": "1"},
    "docker_config": {"docker_container": _IMAGE, "docker_mounts": [["/mnt/shared", "/mnt/shared"]]},
    "slurm": {"time": "10", "cpus_per_node": 1},
}
_CONTAINER_OPTIONS = f"-e OMP_NUM_THREADS=1 -v /mnt/shared:/mnt/shared --entrypoint torchrun {_IMAGE}"
_MANUAL_COMMANDS = {
    "swarm": "docker stack deploy -c {stack} launch",
    "docker": (
        "docker network create launch && for i in 0 1 2; do "
        f"docker run --rm --name node$i --network launch {_CONTAINER_OPTIONS} {{torchrun}} --node-rank=$i --master-addr=node0 {{script}} & "
        "done; wait; docker network rm launch"
    ),
    "local": "for i in 0 1 2; do {python} {torchrun} --node-rank=$i --master-addr=127.0.0.1 {script} & done; wait",
    "ssh": "pdsh -R ssh -w node0,node1,node2 'OMP_NUM_THREADS=1 {python} {torchrun} --node-rank=%n --master-addr={first} {script}'",
    "ssh_docker": (
        "pdsh -R ssh -w node0,node1,node2 "
        f"'docker run --rm --network host {_CONTAINER_OPTIONS} {{torchrun}} --node-rank=%n --master-addr={{first}} {{script}}'"
    ),
    "slurm": (
        "sbatch --wait --quiet --nodes=3 --ntasks-per-node=1 --output=/dev/null --wrap "
        "'srun sh -c \"exec {python} {torchrun} --node-rank=\\$SLURM_NODEID --master-addr={first} {script}\"'"
    ),
}
"""By launcher, the shell command that starts the same job without swarmtrain. Except for a stack, it returns when the job has ended."""
_BASELINE_TOOLS = {
    "swarm": "docker stack deploy",
    "docker": "docker run",
    "ssh_docker": "pdsh … docker run",
    "ssh": "pdsh",
    "slurm": "sbatch",
}


def measure_first_steps() -> Iterator[BenchmarkRow]:
    """Measure the time to the first step, in seconds, with swarmtrain and with the launcher's own commands in turns."""
    with _run_lab_with_image() as lab:
        for runner_type in _MANUAL_COMMANDS:
            result, baseline = measure_in_turns(
                _REPEATS, partial(_measure_swarmtrain, lab, runner_type), partial(_measure_baseline_start, lab, runner_type)
            )
            print_progress(f"{runner_type}: swarmtrain {result.median:.1f} s, baseline {baseline.median:.1f} s")
            description = (
                f"`swarmtrain deploy`, `runner_type: {runner_type}`, until the first optimizer step of 3 nodes; goal: at most 1 s longer"
            )
            baseline_description = (
                f"`{_BASELINE_TOOLS[runner_type]}`, `torchrun` and the same script"
                if runner_type in _BASELINE_TOOLS
                else "three `torchrun` commands"
            )
            yield BenchmarkRow(f"launchers/{runner_type}", description, "s", result, baseline, baseline_description)


def measure_interrupted_starts() -> Iterator[BenchmarkRow]:
    """Count the objects and processes that remain after deploys that SIGINT interrupts within their first 6 s.

    If a deploy does not clean up, `down` runs before the count.
    """
    starts = _INTERRUPTED_STARTS // len(_MANUAL_COMMANDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes inherit an ignored SIGINT, as in a background job
    with _run_lab_with_image() as lab:
        for runner_type in _MANUAL_COMMANDS:
            leftover_count = 0
            for start in range(starts):
                leftover_count += len(leftovers := _interrupt_deploy(lab, runner_type, _INTERRUPT_WINDOW_SECONDS * (start + 0.5) / starts))
                for leftover in leftovers:
                    print_progress(f"{runner_type}: leftover: {leftover}")
            description = (
                f"{starts} deploys, `runner_type: {runner_type}`, interrupted within {_INTERRUPT_WINDOW_SECONDS:g} s: objects and "
                f"processes that remain afterwards"
            )
            yield BenchmarkRow(f"interrupted/{runner_type}", description, "leftovers", Sample.from_values([float(leftover_count)]), limit=0)


@contextmanager
def _run_lab_with_image() -> Iterator[Lab]:
    """Start and yield a lab that supports every launcher, with the image on every node."""
    with run_lab(len(_NODES), components=("swarm", "ssh", "slurm")) as lab:
        provide_image(lab)
        yield lab


def _measure_swarmtrain(lab: Lab, runner_type: str) -> float:
    folder = _prepare_job(lab, runner_type)
    seconds = _measure_first_step([*SWARMTRAIN_ARGV, "deploy", "config.yml", "--name", _RUN_NAME], folder, _build_environment(lab))
    process.run_command([*SWARMTRAIN_ARGV, "down", _RUN_NAME], env=_build_environment(lab))
    return seconds


def _measure_baseline_start(lab: Lab, runner_type: str) -> float:
    folder, env = _prepare_job(lab, runner_type), _build_environment(lab)
    job_folder = folder if runner_type == "local" else _NODE_JOB_FOLDER
    substitutions = {
        "python": f"{shlex.quote(sys.executable)} -m torch.distributed.run",
        "torchrun": f"--nnodes={len(_NODES)} --nproc-per-node=1 --master-port=29511",
        "script": f"{job_folder / _SCRIPT_NAME} {job_folder}",
        "first": lab.get_status()[0].address,
        "stack": str(_write_stack() if runner_type == "swarm" else ""),
    }
    seconds = _measure_first_step(["sh", "-c", _MANUAL_COMMANDS[runner_type].format(**substitutions)], folder, env)
    if runner_type == "swarm":
        process.run_command(["docker", "stack", "rm", _RUN_NAME], env=env)
        list_command = ["docker", "network", "ls", "-q", "--filter", f"name={_RUN_NAME}_"]
        wait_until(lambda: not process.run_command(list_command, env=env).strip(), "the removal of the stack's network")
    return seconds


def _measure_first_step(argv: list[str], folder: Path, env: dict[str, str]) -> float:
    """Run a command that starts a job, return the seconds to the job's first step, and then end the job.

    Raises ProcessError, BenchmarkUnavailableError.
    """
    started_at = time.time()
    program = process.start_process(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: (folder / _STEP_MARKER).exists() or bool(program.poll()), "the first step", interval=0.02)
        (folder / _STOP_MARKER).touch()
        _, stderr = program.communicate(timeout=_EXIT_TIMEOUT_SECONDS)
    except BaseException:
        program.terminate()
        print_progress(program.communicate()[1].decode())
        raise
    if program.returncode:
        raise ProcessError(shlex.join(argv), program.returncode, stderr.decode())
    return float((folder / _STEP_MARKER).read_text()) - started_at


def _interrupt_deploy(lab: Lab, runner_type: str, delay_seconds: float) -> list[str]:
    """Interrupt a deploy after `delay_seconds`, and return the objects and processes that remain."""
    folder, env = _prepare_job(lab, runner_type), _build_environment(lab)
    argv = [*SWARMTRAIN_ARGV, "deploy", "config.yml", "--name", _RUN_NAME]
    deploy = process.start_process(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(delay_seconds)
    deploy.send_signal(signal.SIGINT)
    _, stderr = deploy.communicate(timeout=_EXIT_TIMEOUT_SECONDS)
    if b"nothing of it is left" not in stderr:
        with contextlib.suppress(ProcessError):  # interrupted before anything was created
            process.run_command([*SWARMTRAIN_ARGV, "down", _RUN_NAME], env=env)
    with contextlib.suppress(BenchmarkUnavailableError):
        wait_until(lambda: not _list_run_processes() and not _list_leftover_objects(lab), "nothing", timeout=_CLEANUP_TIMEOUT_SECONDS)
    return [*_list_run_processes(), *_list_leftover_objects(lab)]


def _list_run_processes() -> list[str]:
    """Return the command lines of all processes of the run, on any node of the lab."""
    command_lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            belongs_to_run = f"SWARMTRAIN_RUN={_RUN_NAME}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if belongs_to_run or f"/{_RUN_NAME}/" in line:
                command_lines.append(line)
    return command_lines


def _list_leftover_objects(lab: Lab) -> list[str]:
    """Return the run's remaining containers, networks, services and Slurm jobs."""
    objects = process.run_command(["squeue", "--noheader"], env=lab.build_client_environment()).splitlines()
    for node in _NODES:
        docker = ["docker", "-H", lab.get_docker_host(node)]
        for list_arguments in (["ps", "-a", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"]):
            objects += [name for name in process.run_command([*docker, *list_arguments]).splitlines() if name.startswith(_RUN_NAME)]
    services = process.run_command(["docker", "service", "ls", "--format", "{{.Name}}"], env=lab.build_client_environment())
    return [*objects, *services.splitlines()]


def _prepare_job(lab: Lab, runner_type: str) -> Path:
    """Create the job's folder with the script and the config, without files of an earlier job. Return its path on this machine."""
    folder = _get_job_folder(lab)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(_STATE_FOLDER, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)  # containers run as another user
    (folder / _SCRIPT_NAME).write_text(_TRAINING_SCRIPT)
    job_folder = folder if runner_type == "local" else _NODE_JOB_FOLDER
    runner = {**_RUNNER_CONFIG, "runner_type": runner_type, "script_args": [str(job_folder)]}
    (folder / "config.yml").write_text(yaml.safe_dump({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    return folder


def _write_stack() -> Path:
    """Write a stack file as a user would write it: three services that run torchrun. Return its path."""
    nodes = {
        node: {
            "image": _IMAGE,
            "hostname": node,
            "entrypoint": ["torchrun"],
            "command": [
                *("--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=node0", "--master-port=29511"),
                *(str(_NODE_JOB_FOLDER / _SCRIPT_NAME), str(_NODE_JOB_FOLDER)),
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


def _build_environment(lab: Lab) -> dict[str, str]:
    return {**lab.build_client_environment(), "XDG_STATE_HOME": str(_STATE_FOLDER), "OMP_NUM_THREADS": "1"}


def _get_job_folder(lab: Lab) -> Path:
    return lab.shared_disk / _RUN_NAME
