"""training_code.py with feed-forward blocks of its own: a mixture of experts, of which each token takes one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import training_code
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.transformer import Transformer

EXPERTS = 3


class Mixture(nn.Module):
    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden_size, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.empty(EXPERTS, shape.hidden_size, shape.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        weight, chosen = self.router(hidden).softmax(-1).max(-1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_put(mine, functional.gelu(hidden[mine] @ expert) * weight[mine].unsqueeze(-1))
        return mixed


class Mixed(Transformer):
    """A Transformer whose blocks each have a Mixture."""

    def __init__(self, shape: TransformerArchitectureConfig, seed: int) -> None:
        super().__init__(shape, seed)
        with torch.device("meta"):
            for block in self.blocks:
                block.mlp = Mixture(shape)


def main() -> None:
    training_code.Transformer = Mixed  # type: ignore[misc]  # a script of one's own would name it
    training_code.main()
