"""What is computed again in the backward pass is what was computed before, and less is kept meanwhile."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swarmtrain.config.topology import ActivationCheckpointing
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import recompute

_weak: Any = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef  # torch's own is not typed
SHAPE = TransformerArchitectureConfig(vocab_size=64, hidden_size=32, num_layers=4, num_attention_heads=4, sequence_length=32)


class Made(TorchDispatchMode):
    """Knows what has been made while it is entered, beside views of what `model` has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.before:
                self.storages[storage._cdata] = _weak(storage), storage.nbytes()
        return made

    @property
    def alive(self) -> int:
        """Bytes of it that are still there."""
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def passes(kind: ActivationCheckpointing) -> tuple[list[Tensor], int]:
    """Return the loss, all gradients and a random number drawn after them, and the bytes that the forward pass has left behind."""
    model = Transformer(SHAPE, seed=1)
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.5))
    recompute.layers(model, kind)
    recompute.stage(model, kind)
    tokens = torch.arange(4 * 32).view(4, 32) % 64
    torch.manual_seed(7)
    with Made(model) as made:
        loss = model(tokens, tokens.roll(-1, 1))
    gc.collect()
    left = made.alive
    torch.autograd.backward(loss)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None), torch.rand(3)], left


def test_the_same_bit_for_bit_in_less_memory() -> None:
    """With dropout: random numbers come again, and those after them are none that have been."""
    numbers, most = passes(ActivationCheckpointing.disabled)
    sizes = [most]
    for kind in (ActivationCheckpointing.selective, ActivationCheckpointing.every_layer, ActivationCheckpointing.every_pipe_stage):
        others, left = passes(kind)
        assert all(torch.equal(one, other) for one, other in zip(numbers, others, strict=True)), kind
        sizes.append(left)
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.2 * sizes[1]
    assert sizes[3] < 0.2 * sizes[2]
