"""Print the milliseconds of host time of one layer's forward and backward pass, on rank 0 of a simulated tensor-parallel world.

The layer is tiny and collectives return at once, so the time is that of Python and of torch's dispatch: what a GPU would wait for.
"""

from __future__ import annotations

import sys
import time

import torch

from swarmtrain.config import Config
from swarmtrain.trainer import Transformer, parallelize
from swarmtrain.trainer.memory.simulated_rank import init_fake_process_group
from swarmtrain.trainer.parallel.pipeline_parallel import PipelineModel
from swarmtrain.trainer.runtime import Runtime

_PASSES = 100
_LAYER_COUNTS = 4, 12


def main() -> None:
    config = Config.from_json(sys.argv[1])
    world_size = config.topology.tensor_parallel_size
    torch.set_num_threads(1)
    with init_fake_process_group(0, world_size):
        few, many = (_measure_pass(config, world_size, layers) for layers in _LAYER_COUNTS)
    sys.stdout.write(f"{(many - few) / (_LAYER_COUNTS[1] - _LAYER_COUNTS[0]) * 1e3}\n")


def _measure_pass(config: Config, world_size: int, layers: int) -> float:
    """Return the time, in seconds, of the fastest forward and backward pass of a model with this number of layers."""
    architecture = config.transformer_architecture.model_copy(update={"num_layers": layers})
    config = config.model_copy(update={"transformer_architecture": architecture})
    runtime = Runtime(config, 0, world_size, 0, torch.device("cpu"), run_name="benchmark", node="node0", coordinator_address=None)
    model = parallelize(Transformer(architecture, 0), runtime).wrapped_model
    if isinstance(model, PipelineModel):
        raise TypeError("a pipeline stage cannot be measured alone")
    tokens = torch.zeros((1, architecture.sequence_length), dtype=torch.int64)
    seconds = []
    for _ in range(_PASSES):
        started_at = time.perf_counter()
        torch.autograd.backward(model(tokens, tokens))
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)


if __name__ == "__main__":
    main()
