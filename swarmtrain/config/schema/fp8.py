"""`transformer_architecture.fp8_config_*`: which matmuls of a linear layer are computed in float8 (FP8)."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.schema.section import Section, build_field_error


class FP8DType(StrEnum):
    """Float8 formats. e4m3 has 3 mantissa bits and a maximum of 448; e5m2 has 2 mantissa bits and a maximum of 57344."""

    e4m3 = "e4m3"
    e5m2 = "e5m2"


class FP8Scaling(StrEnum):
    """Granularity of the scaling factors: one per tensor, or one per row."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


class FP8MatmulConfig(Section):
    """Float8 formats of the two operands of one matmul."""

    left_dtype: FP8DType = Field(FP8DType.e4m3, description="Format of the left operand: e4m3 or e5m2.")
    right_dtype: FP8DType = Field(FP8DType.e4m3, description="Format of the right operand: e4m3 or e5m2.")

    @model_validator(mode="after")
    def _check_kernel_exists(self) -> FP8MatmulConfig:
        if self.left_dtype is self.right_dtype is FP8DType.e5m2:
            raise build_field_error("right_dtype", "no device can multiply two e5m2 matrices", "choose e4m3 for one operand")
        return self


class FP8LinearConfig(Section):
    """Float8 formats of the matmuls in a linear layer's forward and backward passes."""

    dtypes_forward: FP8MatmulConfig | None = Field(
        FP8MatmulConfig(), description="Formats of input and weight in the forward matmul. null: computed in precision, not in float8."
    )
    dtypes_grad_input: FP8MatmulConfig | None = Field(
        FP8MatmulConfig(left_dtype=FP8DType.e5m2),
        description="Formats of output gradient and weight in the matmul for the input gradient. null: computed in "
        "precision, not in float8.",
    )
    dtypes_grad_weight: FP8MatmulConfig | None = Field(
        FP8MatmulConfig(right_dtype=FP8DType.e5m2),
        description="Formats of input and output gradient in the matmul for the weight gradient. null: computed in "
        "precision, not in float8.",
    )
    scaling: FP8Scaling = Field(
        FP8Scaling.tensorwise,
        description="Granularity of the scales. tensorwise: one per tensor, faster. rowwise: one per row, more robust to outliers.",
    )
