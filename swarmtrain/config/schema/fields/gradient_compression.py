"""`topology.gradient_compression` and `topology.powersgd`: how replicas sum their gradients."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from swarmtrain.config.schema.section import Section


class GradientCompression(StrEnum):
    """Ways in which replicas sum their gradients."""

    none = "none"
    bf16 = "bf16"
    powersgd = "powersgd"

    @property
    def reproducibility(self) -> str:
        """Which runs have equal losses, as one line. Empty for exact sums, which a change of the world size does not change."""
        return _REPRODUCIBILITY[self]


_REPRODUCIBILITY = {
    GradientCompression.none: "",
    GradientCompression.bf16: "losses are equal after a restart with as many replicas, not with another number of replicas",
    GradientCompression.powersgd: "losses are equal after a restart from a checkpoint that all ranks saved to a shared disk, with as many "
    "replicas; not after a just-in-time checkpoint, with a disk per node, or with another number of replicas",
}


class PowerSgdConfig(Section):
    """PowerSGD: low-rank approximation of gradients, with error feedback."""

    matrix_approximation_rank: int = Field(
        16, ge=1, description="Rank of the approximation of each gradient matrix: more is more accurate, and sends more."
    )
    start_step: int = Field(
        1000,
        ge=0,
        description="Step after which gradients are compressed; up to it, sums are exact. Early gradients tolerate no approximation: at "
        "least the warmup, or a tenth of the run.",
    )
