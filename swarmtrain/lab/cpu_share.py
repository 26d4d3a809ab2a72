"""CPU share: the number of cores with which each node of a lab sizes its thread pools; and the number of its simulated GPUs.

All nodes run on the same cores. If a node sized its thread pools for all of these cores, it would slow down the other nodes. So the
environment variable SWARMTRAIN_CORES contains the share of each node. In containers, a wrapper around runc sets the variable; machine.sh
mounts this wrapper over the real runc. In SSH sessions and Slurm tasks, the settings of sshd and slurmd set it. The kernel still runs the
threads of a node on any free core.

In a lab with simulated GPUs, the wrapper also sets their number, because a node that finds other GPUs than the plan assumes does not start.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.lab.state import LabDescription
from swarmtrain.protocol import ENV_SIMULATED_GPUS

CORES_VARIABLE = "SWARMTRAIN_CORES"
# containerd writes the bundle's config.json on one line. The container's own variables come after the inserted one, and take precedence.
_RUNC_WRAPPER = """#!/bin/sh
# runc, with variables of the lab in the environment of each new container
previous=
bundle=.
for word in "$@"; do
    if [ "$previous" = --bundle ]; then bundle=$word; fi
    previous=$word
done
case " $* " in
*" create "* | *" run "*) sed -i 's/"env":\\["/"env":[{settings},"/' "$bundle/config.json" ;;
esac
exec /run/runc-of-this-machine "$@"
"""


def compute_cores_per_node(description: LabDescription) -> int:
    """Return the CPU share of each node in cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // len(description.nodes))


def format_cores_assignment(description: LabDescription) -> str:
    """Return the shell assignment of SWARMTRAIN_CORES for the nodes of this lab."""
    return f"{CORES_VARIABLE}={compute_cores_per_node(description)}"


def write_runc_wrapper(lab_folder: Path, description: LabDescription) -> None:
    """Write the runc wrapper, which sets the variables of containers, into the lab's folder, where machine.sh expects it."""
    settings = [format_cores_assignment(description)]
    settings += [f"{ENV_SIMULATED_GPUS}={description.gpus}"] if description.gpus else []
    wrapper = lab_folder / "runc"
    wrapper.write_text(_RUNC_WRAPPER.format(settings=",".join(f'"{setting}"' for setting in settings)))
    wrapper.chmod(0o755)
