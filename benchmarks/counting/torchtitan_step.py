"""Count the operations of one step of torchtitan's Llama 3 model: `python -m benchmarks.counting.torchtitan_step REQUESTS`.

The step has what torchtitan's trainer does in one that it does not log: forward and backward pass, clipped gradients, fused AdamW.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.models.llama3 import _build_llama3_layers
from torchtitan.models.llama3.model import Llama3Model

from benchmarks.counting.operation_counter import OperationCosts, OperationCounter
from benchmarks.counting.requests import answer_requests
from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.memory.fused_rms_norm import fuse_rms_norm
from swarmtrain.trainer.memory.simulated_rank import init_fake_process_group


def count_step_costs(config: Config, world_size: int) -> tuple[OperationCosts, OperationCosts]:
    """Return the costs of one step on rank 0 of `world_size` ranks: of its forward and backward passes, and of the rest of the step."""
    counter, architecture = OperationCounter(), config.transformer_architecture
    micro_batches = config.topology.assign_micro_batches(world_size)[0]
    with ExitStack() as contexts:
        contexts.enter_context(init_fake_process_group(0, world_size))
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))  # computes with tensor values
        contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = _build_model(architecture)
        apply_fsdp_to_decoder(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
        loss_function = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=architecture.vocab_size)).build()
        loss_function.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros((config.topology.samples_per_micro_batch, architecture.sequence_length), dtype=torch.int64)
        # The samples are single documents. torchtitan finds the boundaries of documents with a host synchronization, which is not counted.
        boundaries = torch.zeros(len(tokens) + 1, dtype=torch.int32)
        masks = VarlenMetadata(boundaries, boundaries, architecture.sequence_length, architecture.sequence_length)
        token_count = torch.full((), tokens.numel() * micro_batches * world_size)

        def run_forward_backward() -> None:
            for _ in range(micro_batches):
                loss, _ = loss_function(model(tokens, attention_masks=masks), tokens, token_count)
                loss.backward()

        def update_parameters() -> None:
            clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        with counter, fuse_rms_norm():
            run_forward_backward()
            update_parameters()  # the first step creates the optimizer state
            after_first_step = counter.total
            run_forward_backward()
            after_backward = counter.total
            update_parameters()
    return after_backward - after_first_step, counter.total - after_backward


def _build_model(architecture: TransformerArchitectureConfig) -> Llama3Model:
    """Return torchtitan's Llama 3 model in the shape of `architecture`."""
    width, head_size = architecture.hidden_size, architecture.head_size
    layers = _build_llama3_layers(
        n_layers=architecture.num_layers,
        dim=width,
        n_heads=architecture.num_attention_heads,
        n_kv_heads=architecture.kv_heads,
        hidden_dim=architecture.mlp_width,
        rope=ComplexRoPE.Config(dim=head_size, max_seq_len=architecture.sequence_length),
        attn_backend="varlen",
    )
    return Llama3Model.Config(
        dim=width,
        vocab_size=architecture.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=architecture.vocab_size, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width),
        lm_head=Linear.Config(in_features=width, out_features=architecture.vocab_size),
        layers=layers,
    ).build()


if __name__ == "__main__":
    answer_requests(count_step_costs)
