"""Says where this rank stands in the mesh."""

from __future__ import annotations

import logging
import sys

from swarmtrain.trainer import agreement, runtime
from swarmtrain.trainer.parallel import mesh

LOG = logging.getLogger("swarmtrain")


def main() -> None:
    with runtime.start(runtime.read_config(sys.argv[1:])) as here:
        found = mesh.build(here)
        LOG.info("pipe %d data %d model %d", found.pipe_rank, found.data_rank, found.tensor_rank)
        LOG.warning("beware")
        agreement.barrier()  # rank 0 has the store that the others' groups are made with
