"""Activation checkpointing: values recomputed in the backward pass equal the originals, and less memory is kept until then."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swarmtrain.config.schema.topology import ActivationCheckpointing
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import activation_checkpointing

_weak: Any = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef  # torch does not type it
SHAPE = TransformerArchitectureConfig(vocab_size=64, hidden_size=32, num_layers=4, num_attention_heads=4, sequence_length=32)


class AllocationRecorder(TorchDispatchMode):
    """Records the storages that are allocated while it is active; the storages of `model` do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.existing = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.existing:
                self.storages[storage._cdata] = _weak(storage), storage.nbytes()
        return outputs

    @property
    def live_bytes(self) -> int:
        """Bytes of the recorded storages that are still alive."""
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def run_forward_backward(kind: ActivationCheckpointing) -> tuple[list[Tensor], int]:
    """Return the loss, all gradients and random numbers drawn afterwards; and the bytes still allocated after the forward pass."""
    model = Transformer(SHAPE, seed=1).init_weights()
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.5))
    activation_checkpointing.checkpoint_layers(model, kind)
    activation_checkpointing.checkpoint_stage(model, kind)
    tokens = torch.arange(4 * 32).view(4, 32) % 64
    torch.manual_seed(7)
    with AllocationRecorder(model) as allocations:
        loss = model(tokens, tokens.roll(-1, 1))
    gc.collect()
    live_bytes = allocations.live_bytes
    torch.autograd.backward(loss)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None), torch.rand(3)], live_bytes


def test_the_same_bit_for_bit_in_less_memory() -> None:
    """With dropout: recomputation repeats its random numbers, and does not change those drawn afterwards."""
    numbers, most = run_forward_backward(ActivationCheckpointing.disabled)
    sizes = [most]
    for kind in (ActivationCheckpointing.selective, ActivationCheckpointing.every_layer, ActivationCheckpointing.every_pipe_stage):
        others, left = run_forward_backward(kind)
        assert all(torch.equal(one, other) for one, other in zip(numbers, others, strict=True)), kind
        sizes.append(left)
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.2 * sizes[1]
    assert sizes[3] < 0.2 * sizes[2]
