"""The output layer: maps hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import umup


class SoftCappedOutputLayer(nn.Linear):
    """Output layer whose logits s are bounded by c, to c tanh(s / c) (Gemma 2: Gemma Team 2024, arXiv 2408.00118)."""

    def __init__(self, hidden_size: int, vocab_size: int, softcap: float) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        return self.softcap * torch.tanh(super().forward(hidden) / self.softcap)


def build_output_layer(architecture: TransformerArchitectureConfig) -> nn.Linear:
    """Return the output layer (hidden size to vocabulary) of `architecture`."""
    if architecture.umup.enable:
        return umup.UnitScaledHead(architecture)
    if architecture.logit_softcap is not None:
        return SoftCappedOutputLayer(architecture.hidden_size, architecture.vocab_size, architecture.logit_softcap)
    return nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
