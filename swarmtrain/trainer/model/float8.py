"""Linear layers that multiply numbers of eight bits, by torch's scaled products.

Before each product a matrix is multiplied by a power of two, the largest with which its largest number fits, and rounded.
A power of two changes exponents alone: what a number is rounded to does not depend on the scale unless it is among the
smallest, below 2^-15 (e4m3) or 2^-30 (e5m2) of the largest that shares it. So scales of this rank's part will do where
a layer is divided, and nothing is exchanged for them. They follow from the numbers of the moment: there is no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.nn import functional

from swarmtrain.config.fp8 import FP8DType, FP8LinearConfig, FP8MatmulConfig, FP8Scaling
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError

_ROW = 16
"""Rows of products' operands are multiples of this."""
_SMALLEST = 2.0**-100
"""Taken for the largest of numbers that are smaller still, or all zero."""
_CAPABILITY = (8, 9)

Kinds = tuple[torch.dtype, torch.dtype]


class Recipe(NamedTuple):
    """How a layer multiplies. A product without kinds is made as the others of the model are."""

    forward: Kinds | None
    grad_input: Kinds | None
    grad_weight: Kinds | None
    by_row: bool
    emulate: bool

    @property
    def keeps_narrow(self) -> bool:
        """Whether the weight's gradient is made of the numbers to which the forward pass has rounded the input."""
        same = self.forward is not None and self.grad_weight is not None and self.forward[0] == self.grad_weight[1]
        return same and not self.by_row


class Narrow(NamedTuple):
    """A matrix in float8, and what its numbers are to be multiplied by."""

    numbers: Tensor
    scale: Tensor


def recipe(config: FP8LinearConfig, *, emulate: bool) -> Recipe:
    """Return how a layer with `config` multiplies on this machine."""
    forward, grad_input, grad_weight = (
        _kinds(each) for each in (config.dtypes_forward, config.dtypes_grad_input, config.dtypes_grad_weight)
    )
    turned = grad_weight and (grad_weight[1], grad_weight[0])  # outputs stand in rows of the weight: the gradient's matrix is the left one
    return Recipe(forward, grad_input, turned, config.scaling is FP8Scaling.rowwise, emulate)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe) -> Tensor:
    """Return what functional.linear does, by the products of `how`."""
    if not input.numel():
        return functional.linear(input, weight, bias)  # nothing has no largest number
    wide = torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else input.dtype
    made = _divided(input, weight, how, wide) if isinstance(input, DTensor) else _product(input, weight, how, wide)
    return made if bias is None else made + bias.to(wide)


def check(shape: TransformerArchitectureConfig, device: torch.device) -> None:
    """Raise TrainingError if `shape` asks for float8 products and `device` has none."""
    if not shape.float8 or shape.fp8_emulate or _has_float8(device):
        return
    there = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise TrainingError(
        f"needs a GPU that multiplies in float8, as those of compute capability {'.'.join(map(str, _CAPABILITY))} and later do, "
        f"and this is {there}",
        place=f"config transformer_architecture.{next(iter(shape.float8))}",
        hint="leave it out; or transformer_architecture.fp8_emulate: true, to see slowly what float8 does to a model",
    )


def _product(input: Tensor, weight: Tensor, how: Recipe, wide: torch.dtype) -> Tensor:
    made: Tensor = _Product.apply(input.flatten(0, -2), weight, how, wide)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return made.view(*input.shape[:-1], -1)


def _divided(input: DTensor, weight: Tensor, how: Recipe, wide: torch.dtype) -> Tensor:
    """Make this rank's part of a product whose weight is divided by outputs, or by inputs."""
    if not isinstance(weight, DTensor):
        raise TypeError("the input is a DTensor and the weight is none")
    mesh, last = input.device_mesh, input.dim() - 1
    by_outputs = weight.placements[0].is_shard(0)
    # Of outputs a rank has some, each whole; or all, each of some inputs: a summand.
    there, back = (Shard(last), Partial()) if by_outputs else (Partial(), Shard(last))
    placement: Placement = there
    made = _product(input.to_local(grad_placements=[back]), weight.to_local(), how, wide)
    return DTensor.from_local(made, mesh, [placement], run_check=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, how: Recipe, wide: torch.dtype) -> Tensor:
        """`input` (tokens, inputs), `weight` (outputs, inputs)."""
        ctx.how, ctx.wide, ctx.given = how, wide, input.dtype
        narrow = _rounded(input, how.forward[0], how) if how.forward and how.keeps_narrow else None
        # Not the rounded weight: it would stay when fully_shard lets go of the parameter.
        ctx.save_for_backward(*(narrow or (input,)), weight)
        return _times(narrow or input, weight, how.forward, how, wide, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        *kept, weight = ctx.saved_tensors
        given = Narrow(kept[0].t(), kept[1]) if ctx.how.keeps_narrow else kept[0].t()
        of_weight = ctx.how.grad_weight if len(gradient) % _ROW == 0 else None
        to_input = _times(gradient, weight.t(), ctx.how.grad_input, ctx.how, ctx.wide)
        if not ctx.needs_input_grad[1]:
            return to_input.to(ctx.given), None, None, None
        to_weight = _times(gradient.t(), given, of_weight, ctx.how, weight.dtype if of_weight else ctx.wide)
        return to_input.to(ctx.given), to_weight.to(weight.dtype), None, None


def _times(
    left: Tensor | Narrow, right: Tensor | Narrow, kinds: Kinds | None, how: Recipe, wide: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return the products of each row of `left` with each of `right`, in `wide`. `fast`: sum in fewer bits where that is faster."""
    if kinds is None:
        return _widened(left, wide) @ _widened(right, wide).t()
    one, other = _rounded(left, kinds[0], how), _rounded(right, kinds[1], how)
    if how.emulate:
        with torch.autocast(one.numbers.device.type, enabled=False):
            return (_widened(one, torch.float32) @ _widened(other, torch.float32).t()).to(wide)
    made = torch._scaled_mm(
        one.numbers.contiguous(),
        other.numbers.contiguous().t(),
        scale_a=one.scale,
        scale_b=other.scale.t(),
        out_dtype=torch.bfloat16 if how.by_row else wide,
        use_fast_accum=fast,
    )
    return made.to(wide)


def _rounded(values: Tensor | Narrow, kind: torch.dtype, how: Recipe) -> Narrow:
    if isinstance(values, Narrow):
        return values
    sizes = values.abs()
    largest = (sizes.amax(1, keepdim=True) if how.by_row else sizes.amax()).float().clamp(min=_SMALLEST)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(kind).max / largest)))
    return Narrow((values * scale).to(kind), scale.reciprocal())


def _widened(values: Tensor | Narrow, kind: torch.dtype) -> Tensor:
    return values.to(kind) if isinstance(values, Tensor) else values.numbers.to(kind) * values.scale.to(kind)


def _kinds(config: FP8MatmulConfig | None) -> Kinds | None:
    names = {FP8DType.e4m3: torch.float8_e4m3fn, FP8DType.e5m2: torch.float8_e5m2}
    if _is_mi300():
        names = {FP8DType.e4m3: torch.float8_e4m3fnuz, FP8DType.e5m2: torch.float8_e5m2fnuz}
    return (names[config.left_dtype], names[config.right_dtype]) if config else None


def _has_float8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return _is_mi300() or "gfx95" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def _is_mi300() -> bool:
    return bool(torch.version.hip) and torch.cuda.is_available() and "gfx94" in torch.cuda.get_device_properties().gcnArchName
