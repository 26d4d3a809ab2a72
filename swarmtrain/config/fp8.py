"""`transformer_architecture.fp8_config_*`: which products of a linear layer are made of numbers of eight bits."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, wrong


class FP8DType(StrEnum):
    """Numbers of eight bits: e4m3 has three for what is behind the point and reaches 448; e5m2 has two and reaches 57344."""

    e4m3 = "e4m3"
    e5m2 = "e5m2"


class FP8Scaling(StrEnum):
    """What shares a scale."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


class FP8MatmulConfig(Section):
    """The numbers of one product."""

    left_dtype: FP8DType = Field(FP8DType.e4m3, description="Numbers of the left matrix: e4m3 or e5m2.")
    right_dtype: FP8DType = Field(FP8DType.e4m3, description="Numbers of the right matrix.")

    @model_validator(mode="after")
    def _has_a_kernel(self) -> FP8MatmulConfig:
        if self.left_dtype is self.right_dtype is FP8DType.e5m2:
            raise wrong("right_dtype", "no device multiplies two matrices of e5m2", "e4m3 for one of them")
        return self


class FP8LinearConfig(Section):
    """The products of a linear layer's forward and backward pass."""

    dtypes_forward: FP8MatmulConfig | None = Field(FP8MatmulConfig(), description="Of inputs and weights. null: in precision.")
    dtypes_grad_input: FP8MatmulConfig | None = Field(
        FP8MatmulConfig(left_dtype=FP8DType.e5m2), description="Of the output's gradient and weights. null: in precision."
    )
    dtypes_grad_weight: FP8MatmulConfig | None = Field(
        FP8MatmulConfig(right_dtype=FP8DType.e5m2), description="Of inputs and the output's gradient. null: in precision."
    )
    scaling: FP8Scaling = Field(
        FP8Scaling.tensorwise, description="What shares a scale: tensorwise is the faster, rowwise bears outliers better."
    )
