"""Plan → the one sbatch script, that `deploy` submits and `generate` writes. Values in, text out.

Slurm starts it on the first node of the job. It starts one keeper on each node (swarmtrain.launchers.slurm.node), which keeps
the node's supervisor and, on the first, the notice board. Told that the time limit is near, it lets the ranks save and leave, and
queues its own job again; so it does within the grace time of a preemption. After that Slurm itself queues it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import PurePath

from swarmtrain.config.slurm import ApptainerConfig
from swarmtrain.plan import Plan
from swarmtrain.render.command import Place, board_env, node_env
from swarmtrain.wire import EXIT_PLANNED

KEEPER = "swarmtrain.launchers.slurm.node"
COMMENT = "swarmtrain"
LEAVE = "URG"
"""The signal that asks keepers to let their ranks save and leave. Slurm sends one to all processes, and others do not hear this."""
TERMINATED = "terminated.state"
"""File in the run's folder: Slurm itself has sent SIGTERM to the ranks since the job began."""
# What only a node of the job knows: filled in there.
_HERE = "here"


@dataclass(frozen=True)
class Site:
    """Where things are, in the eyes of the nodes: on a disk that all of them see."""

    folder: PurePath
    """The run's folder."""
    cwd: str
    """Folder that ranks start in."""
    python: str
    path: str = ""
    """PYTHONPATH of whoever deploys; empty where there is none."""


def digest(plan: Plan) -> str:
    """Say which files the job is made of: other content or another number of nodes, another digest."""
    cargo = (item.digest for item in (*plan.cargo.code, *plan.cargo.secrets))
    content = "-".join([plan.config.resolved().digest, str(len(plan.nodes)), *cargo])
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def files_in(site: Site, plan: Plan) -> PurePath:
    """Return the folder of the run's files, of which a job that is queued keeps those that it was submitted with."""
    return site.folder / f"files-{digest(plan)}"


def script(plan: Plan, site: Site) -> str:
    """Return the sbatch script."""
    slurm = plan.config.runner.slurm
    variables = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(_environment(plan, site).items()))
    prelude = "\n".join(slurm.prelude) or ":"
    mark = shlex.quote(str(site.folder / TERMINATED))
    # A job that leaves within the grace time of its preemption, of which only the ranks are told, has ended for Slurm. One that is
    # cancelled hears SIGTERM too, but is not running any more.
    # Slurm takes the job back to the queue by ending it: the script waits for that, and hears SIGTERM again.
    again = (
        f"""[ -e {mark} ] && [ -n "$(squeue --noheader --states=RUNNING --jobs="$SLURM_JOB_ID" --format=%i)" ] && again=1
[ "$code" = {EXIT_PLANNED} ] && [ -n "$again" ] && scontrol requeue "$SLURM_JOB_ID" && exec sleep 600"""
        if slurm.requeue
        else ":"
    )
    return f"""#!/bin/bash
{chr(10).join(f"#SBATCH {option}" for option in _options(plan, site))}

# Run {plan.run} of swarmtrain; `swarmtrain status {plan.run}` shows how it stands. Secrets are in files, and not here.
# What lies where: {site.folder}
cd {shlex.quote(site.cwd)} || exit
{prelude}
{variables}

again=
rm -f {mark}
trap 'again=1; scancel --signal={LEAVE} "$SLURM_JOB_ID"' USR1  # near the time limit: the ranks save and leave
trap ':' TERM  # preempted or cancelled: Slurm tells the ranks too, and what they save is waited for
{_srun(plan, site)} &
srun=$!
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; code=$?; done
wait "$srun" 2>/dev/null; last=$?; [ "$last" = 127 ] || code=$last  # the wait before may have ended by a signal of ours
{again}
exit "$code"
"""


def _options(plan: Plan, site: Site) -> list[str]:
    runner, slurm = plan.config.runner, plan.config.runner.slurm
    elastic = plan.min_nodes < plan.max_nodes
    values = {
        "job-name": plan.run,
        "comment": COMMENT,
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
        "chdir": site.cwd,
        "output": f"{PurePath(slurm.log_dir) / '%j.out' if slurm.log_dir else site.folder / 'slurm.out'}",
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.signal_seconds}",
    }
    flags = ["--requeue" if slurm.requeue else "--no-requeue", *(["--no-kill"] if elastic else [])]
    return [*(f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None), *flags, *slurm.options]


def _srun(plan: Plan, site: Site) -> str:
    """One task on each node. A node that fails is its keeper's business, and the board's, not a reason to end the others."""
    slurm = plan.config.runner.slurm
    elastic = plan.min_nodes < plan.max_nodes
    argv = ["srun", f"--job-name={plan.run}", f"--nodes={len(plan.nodes)}", f"--ntasks={len(plan.nodes)}", "--ntasks-per-node=1"]
    argv += [f"--cpus-per-task={slurm.cpus_per_node}"] if slurm.cpus_per_node else []
    argv += ["--kill-on-bad-exit=0", "--wait=0", "--unbuffered", *(["--no-kill"] if elastic else [])]
    python = slurm.apptainer.python if slurm.apptainer.image else site.python
    return " ".join(shlex.quote(word) for word in [*argv, *wrapped(slurm.apptainer, plan, site), python, "-m", KEEPER, str(site.folder)])


def wrapped(apptainer: ApptainerConfig, plan: Plan, site: Site) -> list[str]:
    """Return what goes before a command that is to run in the container; nothing where there is none."""
    if not apptainer.image:
        return []
    flags = ["--nv"] if apptainer.nv else []
    flags += ["--home", apptainer.home] if apptainer.home else []
    save_dir = plan.config.trainer.save_dir
    binds = [str(site.folder), site.cwd, *([str(save_dir)] if save_dir and PurePath(save_dir).is_absolute() else []), *apptainer.binds]
    flags += [word for bind in dict.fromkeys(binds) for word in ("--bind", bind)]
    flags += [word for name, value in sorted(apptainer.env.items()) for word in ("--env", f"{name}={value}")]
    return [apptainer.program, "exec", *flags, "--pwd", site.cwd, apptainer.image]


def _environment(plan: Plan, site: Site) -> dict[str, str]:
    """All that is known before the job runs. Its ports, the first node's name, and each node's own are not."""
    files = files_in(site, plan)
    place = Place(
        board_host=_HERE,
        bind="0.0.0.0",  # noqa: S104  # the other nodes must reach it
        config=str(files / "config.json"),
        code_dir=files / "code",
        secrets_dir=files / "secrets",
        log_dir=str(site.folder / "logs"),
        store_port=0,
        board_port=0,
    )
    found = {**node_env(plan, plan.nodes[0], place), **board_env(plan, place)}
    for name in ("BOARD", "STORE", "NODE", "BOARD_PORT", "STORE_PORT"):
        del found[f"SWARMTRAIN_{name}"]
    port = {"SWARMTRAIN_MASTER_PORT": json.dumps(plan.config.runner.master_port)} if plan.config.runner.master_port else {}
    path = {"PYTHONPATH": site.path} if site.path and not plan.config.runner.slurm.apptainer.image else {}
    return {**found, **port, "SWARMTRAIN_FILES": files.name, **path}
