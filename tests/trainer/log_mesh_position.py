"""Log this rank's position in the mesh."""

from __future__ import annotations

import logging
import sys

from swarmtrain.trainer import collectives, read_config, start_runtime
from swarmtrain.trainer.parallel import mesh

LOG = logging.getLogger("swarmtrain")


def main() -> None:
    with start_runtime(read_config(sys.argv[1:])) as rank_runtime:
        device_mesh = mesh.build_mesh(rank_runtime)
        LOG.info("pipe %d data %d model %d", device_mesh.pipe_rank, device_mesh.data_rank, device_mesh.tensor_rank)
        LOG.warning("beware")
        collectives.barrier()  # rank 0 hosts the store that the other ranks need to create their groups
