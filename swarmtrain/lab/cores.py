"""The share of this machine's cores that each node of a lab counts as its own.

All nodes run on the same cores. A node that sized its thread pools by all of them would get in the way of the others, so each is told
its share in SWARMTRAIN_CORES: containers by a wrapper around runc, which machine.sh mounts over the real one; SSH sessions and Slurm
tasks by the settings of sshd and slurmd. The kernel still runs the threads of a node on any core that is free.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.lab.state import Description

VARIABLE = "SWARMTRAIN_CORES"
# containerd writes the bundle's config.json on one line. A container's own environment comes later, and wins.
_RUNC = """#!/bin/sh
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


def share(description: Description) -> int:
    """Return how many cores each node counts, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // len(description.nodes))


def setting(description: Description) -> str:
    """Return SWARMTRAIN_CORES and its value as an assignment."""
    return f"{VARIABLE}={share(description)}"


def write_runc(directory: Path, description: Description) -> None:
    """Write the wrapper around runc into a lab's directory, where machine.sh finds it."""
    wrapper = directory / "runc"
    wrapper.write_text(_RUNC.format(setting=setting(description)))
    wrapper.chmod(0o755)
