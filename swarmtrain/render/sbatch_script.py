"""Convert a plan to the sbatch script that `deploy` submits and `generate` writes.

Slurm starts the script on the first node of the job. The script starts one process keeper on each node
(swarmtrain.launchers.slurm.node_task), which keeps the node's supervisor running and, on the first node, the coordinator. When Slurm
signals that the time limit is near or that the job is preempted, the script lets the ranks save and exit, and requeues its own job. If the
grace time of a preemption ends before that, Slurm itself requeues the job.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import PurePath

from swarmtrain.config import Config
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EXIT_PLANNED, RUN_KEY_NAME
from swarmtrain.render.process_environment import NodeLayout, build_coordinator_env, build_node_env

NODE_TASK_MODULE = "swarmtrain.launchers.slurm.node_task"
JOB_COMMENT = "swarmtrain"
GRACEFUL_EXIT_SIGNAL = "URG"
"""Signal that makes the ranks save and exit. Slurm sends it to all processes of the job; programs ignore SIGURG by default."""
TERMINATED_FILE = "terminated.state"
"""Marker file in the run's folder: it exists if Slurm itself has sent SIGTERM to the ranks since the job began."""
# Placeholder for the coordinator's host, which only the nodes of the job know. The variables that contain it are omitted from the script.
_PLACEHOLDER_HOST = "here"


@dataclass(frozen=True)
class JobLayout:
    """Layout of a Slurm job: its paths as seen from the nodes, on a shared file system."""

    run_folder: PurePath
    cwd: str
    """Working directory of the ranks."""
    python: str
    python_path: str = ""
    """PYTHONPATH of the user who deploys; empty if it is not set."""


def compute_job_digest(plan: Plan) -> str:
    """Return a digest of the job's files, which changes with their content and with the number of nodes."""
    content = f"{plan.config.to_node_config().digest}-{len(plan.nodes)}-{plan.cargo.digest}"
    if plan.config.notify:
        content += f"-{plan.config.dump_notify()}-{plan.cargo.channel_digest}"
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def get_job_files_folder(job_layout: JobLayout, plan: Plan) -> PurePath:
    """Return the folder of the job's files.

    Its name contains their digest: a queued job keeps using the files with which it was submitted.
    """
    return job_layout.run_folder / f"files-{compute_job_digest(plan)}"


def render_sbatch_script(plan: Plan, job_layout: JobLayout) -> str:
    """Return the sbatch script of `plan`, as text."""
    slurm = plan.config.runner.slurm
    variables = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(_build_job_environment(plan, job_layout).items()))
    prelude = "\n".join(slurm.prelude) or ":"
    terminated_file = shlex.quote(str(job_layout.run_folder / TERMINATED_FILE))
    # Slurm does not requeue a preempted job that exits within its grace time, so the script does. It recognizes a preemption by the marker
    # file, since Slurm notifies only the ranks of a preemption. A cancelled job receives SIGTERM too, but is no longer in state RUNNING. To
    # requeue a job, Slurm ends it: the script waits for that, and receives SIGTERM again.
    requeue_commands = (
        f"""[ -e {terminated_file} ] && [ -n "$(squeue --noheader --states=RUNNING --jobs="$SLURM_JOB_ID" --format=%i)" ] && again=1
[ "$code" = {EXIT_PLANNED} ] && [ -n "$again" ] && scontrol requeue "$SLURM_JOB_ID" && exec sleep 600"""
        if slurm.requeue
        else ":"
    )
    return f"""#!/bin/bash
{chr(10).join(f"#SBATCH {option}" for option in _build_sbatch_options(plan, job_layout))}

# Run {plan.run} of swarmtrain; `swarmtrain status {plan.run}` shows its status. Secrets are in files, not here.
# Files of the run: {job_layout.run_folder}
cd {shlex.quote(job_layout.cwd)} || exit
{prelude}
{variables}

again=
rm -f {terminated_file}
trap 'again=1; scancel --signal={GRACEFUL_EXIT_SIGNAL} "$SLURM_JOB_ID"' USR1  # near the time limit: the ranks save and exit
trap ':' TERM  # preempted or cancelled: Slurm signals the ranks too; wait until they have saved
{_build_srun_command(plan, job_layout)} &
srun=$!
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; code=$?; done
wait "$srun" 2>/dev/null; last=$?; [ "$last" = 127 ] || code=$last  # a trapped signal may have interrupted the wait in the loop
{requeue_commands}
exit "$code"
"""


def _build_sbatch_options(plan: Plan, job_layout: JobLayout) -> list[str]:
    runner, slurm = plan.config.runner, plan.config.runner.slurm
    is_elastic = plan.min_nodes < plan.max_nodes
    values = {
        "job-name": plan.run,
        "comment": JOB_COMMENT,
        "nodes": str(len(plan.nodes)),
        "ntasks-per-node": "1",
        "cpus-per-task": slurm.cpus_per_node,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "time": slurm.time,
        "gres": slurm.gres,
        "gpus-per-node": slurm.gpus_per_node,
        "mem": slurm.memory,
        "constraint": slurm.constraint,
        "nodelist": ",".join(node.host for node in plan.nodes) if runner.hosts else None,
        "exclude": slurm.exclude,
        "chdir": job_layout.cwd,
        "output": f"{PurePath(slurm.log_dir) / '%j.out' if slurm.log_dir else job_layout.run_folder / 'slurm.out'}",
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.signal_seconds}",
    }
    flags = ["--requeue" if slurm.requeue else "--no-requeue", *(["--no-kill"] if is_elastic else [])]
    return [*(f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None), *flags, *slurm.options]


def _build_srun_command(plan: Plan, job_layout: JobLayout) -> str:
    """Return the srun command of the script, with one task on each node.

    The failure of a node is handled by its process keeper and the coordinator, and does not end the other tasks.
    """
    slurm = plan.config.runner.slurm
    is_elastic = plan.min_nodes < plan.max_nodes
    argv = ["srun", f"--job-name={plan.run}", f"--nodes={len(plan.nodes)}", f"--ntasks={len(plan.nodes)}", "--ntasks-per-node=1"]
    argv += [f"--cpus-per-task={slurm.cpus_per_node}"] if slurm.cpus_per_node else []
    argv += ["--kill-on-bad-exit=0", "--wait=0", "--unbuffered", *(["--no-kill"] if is_elastic else [])]
    python = slurm.apptainer.python if slurm.apptainer.image else job_layout.python
    return " ".join(
        shlex.quote(word)
        for word in [
            *argv,
            *build_apptainer_command_prefix(plan.config, job_layout),
            python,
            "-m",
            NODE_TASK_MODULE,
            str(job_layout.run_folder),
        ]
    )


def build_apptainer_command_prefix(config: Config, job_layout: JobLayout) -> list[str]:
    """Return the command prefix that runs a command in the Apptainer container. Empty if no image is configured."""
    apptainer, save_dir = config.runner.slurm.apptainer, config.trainer.save_dir
    if not apptainer.image:
        return []
    flags = ["--nv"] if apptainer.nv else []
    flags += ["--home", apptainer.home] if apptainer.home else []
    binds = [
        str(job_layout.run_folder),
        job_layout.cwd,
        *([str(save_dir)] if save_dir and PurePath(save_dir).is_absolute() else []),
        *apptainer.binds,
    ]
    flags += [word for bind in dict.fromkeys(binds) for word in ("--bind", bind)]
    flags += [word for name, value in sorted(apptainer.env.items()) for word in ("--env", f"{name}={value}")]
    return [apptainer.program, "exec", *flags, "--pwd", job_layout.cwd, apptainer.image]


def _build_job_environment(plan: Plan, job_layout: JobLayout) -> dict[str, str]:
    """Return the variables that are known before the job runs: all except its ports, the first node's name, and each node's own name."""
    files_folder = get_job_files_folder(job_layout, plan)
    layout = NodeLayout(
        coordinator_host=_PLACEHOLDER_HOST,
        bind_address="0.0.0.0",  # noqa: S104  # the other nodes must reach it
        config_path=str(files_folder / "config.json"),
        code_folder=files_folder / "code",
        secrets_dir=files_folder / "secrets",
        key_file=str(job_layout.run_folder / RUN_KEY_NAME),
        log_dir=str(job_layout.run_folder / "logs"),
        coordinator_port=0,
    )
    variables = {**build_node_env(plan, plan.nodes[0], layout), **build_coordinator_env(plan, layout)}
    for name in ("COORDINATOR", "NODE", "COORDINATOR_PORT", "RUN_ID"):
        del variables[f"SWARMTRAIN_{name}"]
    port_variables = {"SWARMTRAIN_MASTER_PORT": json.dumps(plan.config.runner.master_port)} if plan.config.runner.master_port else {}
    path_variables = (
        {"PYTHONPATH": job_layout.python_path} if job_layout.python_path and not plan.config.runner.slurm.apptainer.image else {}
    )
    return {**variables, **port_variables, "SWARMTRAIN_FILES": files_folder.name, **path_variables}
