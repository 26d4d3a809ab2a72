"""training_code.py with custom feed-forward blocks: a mixture of experts with one expert per token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import training_code
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.transformer import Transformer

EXPERTS = 3


class MixtureOfExperts(nn.Module):
    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.router = nn.Linear(architecture.hidden_size, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.empty(EXPERTS, architecture.hidden_size, architecture.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        weight, expert_indices = self.router(hidden).softmax(-1).max(-1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            selected = (expert_indices == number).nonzero(as_tuple=True)
            mixed = mixed.index_put(selected, functional.gelu(hidden[selected] @ expert) * weight[selected].unsqueeze(-1))
        return mixed


class MixtureTransformer(Transformer):
    """A Transformer with a `MixtureOfExperts` in each block."""

    def __init__(self, architecture: TransformerArchitectureConfig, seed: int) -> None:
        super().__init__(architecture, seed)
        with torch.device("meta"):
            for block in self.blocks:
                block.mlp = MixtureOfExperts(architecture)


def main() -> None:
    training_code.Transformer = MixtureTransformer  # type: ignore[misc]  # a custom script would use the class directly
    training_code.main()
