"""CPU share: the number of this machine's cores that each node of a lab counts as its own.

All nodes run on the same cores. A node that sized its thread pools by all of them would slow down the others, so each gets its share in
SWARMTRAIN_CORES: containers from a wrapper around runc, which machine.sh mounts over the real one; SSH sessions and Slurm tasks from the
settings of sshd and slurmd. The kernel still runs the threads of a node on any free core.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.lab.state import LabDescription

CORES_VARIABLE = "SWARMTRAIN_CORES"
# containerd writes the bundle's config.json on one line. A container's own variables follow and take precedence.
_RUNC_WRAPPER = """#!/bin/sh
# runc, with {setting} in the environment of each new container
previous=
bundle=.
for word in "$@"; do
    if [ "$previous" = --bundle ]; then bundle=$word; fi
    previous=$word
done
case " $* " in
*" create "* | *" run "*) sed -i 's/"env":\\["/"env":["{setting}","/' "$bundle/config.json" ;;
esac
exec /run/runc-of-this-machine "$@"
"""


def compute_cores_per_node(description: LabDescription) -> int:
    """Return the number of cores that each node counts as its own, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // len(description.nodes))


def format_cores_assignment(description: LabDescription) -> str:
    """Return the shell assignment of SWARMTRAIN_CORES for the nodes of this lab."""
    return f"{CORES_VARIABLE}={compute_cores_per_node(description)}"


def write_runc_wrapper(directory: Path, description: LabDescription) -> None:
    """Write the runc wrapper, which sets SWARMTRAIN_CORES, into the lab's directory, where machine.sh expects it."""
    wrapper = directory / "runc"
    wrapper.write_text(_RUNC_WRAPPER.format(setting=format_cores_assignment(description)))
    wrapper.chmod(0o755)
