"""Linear layers that multiply in float8 (FP8), with torch's scaled matmuls (`torch._scaled_mm`).

Before each matmul a matrix is multiplied by a scale, the largest power of two for which its largest value fits into float8, and then
rounded. A power of two changes exponents only: the rounded value does not depend on the scale, except for values below 2^-15 (e4m3)
or 2^-30 (e5m2) of the largest value with the same scale. So each rank can use the scales of its own shard of a tensor-parallel layer,
without communication.
Scales are computed from the current values (dynamic scaling), so there is no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from swarmtrain.config.schema.fp8 import FP8DType, FP8LinearConfig, FP8MatmulConfig, FP8Scaling
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError

_ROW_MULTIPLE = 16
"""Alignment: the number of rows of a float8 matmul's operands must be a multiple of this."""
_MIN_AMAX = 2.0**-100
"""Lower bound of the absolute maximum, also used for all-zero matrices."""
_MIN_COMPUTE_CAPABILITY = (8, 9)

OperandDtypes = tuple[torch.dtype, torch.dtype]


class Float8Recipe(NamedTuple):
    """Float8 settings of a linear layer: for each of its three matmuls, the dtypes of the two operands.

    None: the matmul is not computed in float8.
    """

    forward: OperandDtypes | None
    grad_input: OperandDtypes | None
    grad_weight: OperandDtypes | None
    rowwise: bool
    emulate: bool

    @property
    def should_save_float8_input(self) -> bool:
        """Whether the float8 input of the forward pass is saved and reused to compute the weight gradient."""
        same = self.forward is not None and self.grad_weight is not None and self.forward[0] == self.grad_weight[1]
        return same and not self.rowwise


class Float8Tensor(NamedTuple):
    """A matrix in float8, and the scale by which it is multiplied to restore the original values."""

    data: Tensor
    scale: Tensor


def build_recipe(config: FP8LinearConfig, *, emulate: bool) -> Float8Recipe:
    """Return the float8 recipe for a layer with the settings `config` on this machine.

    `emulate`: round the operands to float8, but multiply them in float32, on devices without float8 matmuls.
    """
    forward, grad_input, grad_weight = (
        _resolve_operand_dtypes(each) for each in (config.dtypes_forward, config.dtypes_grad_input, config.dtypes_grad_weight)
    )
    swapped = grad_weight and (grad_weight[1], grad_weight[0])  # weight rows are outputs: the output gradient is the left operand
    return Float8Recipe(forward, grad_input, swapped, config.scaling is FP8Scaling.rowwise, emulate)


def compute_linear(input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Float8Recipe) -> Tensor:
    """Return `input` times the transpose of `weight` plus `bias`, like `functional.linear`, computed in float8 according to `recipe`."""
    if not input.numel():
        return functional.linear(input, weight, bias)  # an empty tensor has no maximum to compute a scale from
    matrix: Tensor = _Float8Matmul.apply(input.flatten(0, -2), weight, recipe)  # type: ignore[no-untyped-call]  # not typed in torch
    output = matrix.view(*input.shape[:-1], -1)
    return output if bias is None else output + bias


def check_float8_support(architecture: TransformerArchitectureConfig, device: torch.device) -> None:
    """Raise TrainingError if `architecture` needs float8 matmuls and `device` does not support them."""
    if not architecture.float8_layers or architecture.fp8_emulate or _has_float8_support(device):
        return
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise TrainingError(
        f"needs a GPU that supports float8 matmuls, such as one of compute capability {'.'.join(map(str, _MIN_COMPUTE_CAPABILITY))} or "
        f"higher, "
        f"but this device is {device_name}",
        place=f"config transformer_architecture.{next(iter(architecture.float8_layers))}",
        hint="remove it, or set transformer_architecture.fp8_emulate: true for a slow emulation of float8",
    )


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
        """Return `input` (tokens, inputs) times the transpose of `weight` (outputs, inputs): (tokens, outputs)."""
        ctx.recipe, ctx.dtype = recipe, input.dtype
        float8_input = _quantize_values(input, recipe.forward[0], recipe) if recipe.forward and recipe.should_save_float8_input else None
        # Save the weight, not its quantized copy: the copy would stay allocated after fully_shard frees the parameter.
        ctx.save_for_backward(*(float8_input or (input,)), weight)
        return _matmul_transposed(float8_input or input, weight, recipe.forward, recipe, input.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        *saved_input, weight = ctx.saved_tensors
        transposed_input = Float8Tensor(saved_input[0].t(), saved_input[1]) if ctx.recipe.should_save_float8_input else saved_input[0].t()
        weight_gradient_dtypes = ctx.recipe.grad_weight if len(gradient) % _ROW_MULTIPLE == 0 else None
        input_gradient = _matmul_transposed(gradient, weight.t(), ctx.recipe.grad_input, ctx.recipe, ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return input_gradient, None, None
        weight_gradient = _matmul_transposed(
            gradient.t(), transposed_input, weight_gradient_dtypes, ctx.recipe, weight.dtype if weight_gradient_dtypes else ctx.dtype
        )
        return input_gradient, weight_gradient.to(weight.dtype), None


def _matmul_transposed(
    left: Tensor | Float8Tensor,
    right: Tensor | Float8Tensor,
    dtypes: OperandDtypes | None,
    recipe: Float8Recipe,
    output_dtype: torch.dtype,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """Return `left` (m, k) times the transpose of `right` (n, k) in `output_dtype`: (m, n).

    `dtypes`: float8 dtypes of the operands; None: multiply in `output_dtype`. `use_fast_accum`: accumulate with lower precision if that
    is faster.
    """
    if dtypes is None:
        return _dequantize_values(left, output_dtype) @ _dequantize_values(right, output_dtype).t()
    left_float8, right_float8 = _quantize_values(left, dtypes[0], recipe), _quantize_values(right, dtypes[1], recipe)
    if recipe.emulate:
        return (_dequantize_values(left_float8, torch.float32) @ _dequantize_values(right_float8, torch.float32).t()).to(output_dtype)
    output = torch._scaled_mm(
        left_float8.data.contiguous(),
        right_float8.data.contiguous().t(),
        scale_a=left_float8.scale,
        scale_b=right_float8.scale.t(),
        out_dtype=torch.bfloat16 if recipe.rowwise else output_dtype,
        use_fast_accum=use_fast_accum,
    )
    # Without the condition, torch 2.11 compiles a function without gradients: it takes a conversion that does nothing for an output that
    # needs none.
    return output if output.dtype == output_dtype else output.to(output_dtype)


def _quantize_values(values: Tensor | Float8Tensor, dtype: torch.dtype, recipe: Float8Recipe) -> Float8Tensor:
    if isinstance(values, Float8Tensor):
        return values
    magnitudes = values.abs()
    amax = (magnitudes.amax(1, keepdim=True) if recipe.rowwise else magnitudes.amax()).float().clamp(min=_MIN_AMAX)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / amax)))
    return Float8Tensor((values * scale).to(dtype), scale.reciprocal())


def _dequantize_values(values: Tensor | Float8Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if isinstance(values, Tensor) else values.data.to(dtype) * values.scale.to(dtype)


def _resolve_operand_dtypes(config: FP8MatmulConfig | None) -> OperandDtypes | None:
    dtypes = {FP8DType.e4m3: torch.float8_e4m3fn, FP8DType.e5m2: torch.float8_e5m2}
    if _is_mi300():
        dtypes = {FP8DType.e4m3: torch.float8_e4m3fnuz, FP8DType.e5m2: torch.float8_e5m2fnuz}
    return (dtypes[config.left_dtype], dtypes[config.right_dtype]) if config else None


def _has_float8_support(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return _is_mi300() or "gfx95" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= _MIN_COMPUTE_CAPABILITY


def _is_mi300() -> bool:
    return bool(torch.version.hip) and torch.cuda.is_available() and "gfx94" in torch.cuda.get_device_properties().gcnArchName
