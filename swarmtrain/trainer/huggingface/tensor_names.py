"""Tensor names and layouts of Hugging Face model families.

In some families, the query, key and value weights are fused into one tensor, or weights are transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from swarmtrain.config.families.family import ModelFamily
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig

_BUFFER_SUFFIXES = ("inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


class TensorMapping:
    """Mapping between swarmtrain's parameters and the tensors of a Hugging Face model family, in both directions."""

    def __init__(
        self, family: ModelFamily, architecture: TransformerArchitectureConfig, parameter_shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """`parameter_shapes`: shapes of swarmtrain's parameters, by name."""
        self._names, self._shape, self._sizes = family.tensor_names, architecture, parameter_shapes
        self.sources: dict[str, list[str]] = {}
        """For each tensor of the family, the swarmtrain parameters that it consists of: a single one, or query, key and value."""
        for name in parameter_shapes:
            self.sources.setdefault(self._map_parameter_name(name), []).append(name)
        self._locations = {
            name: (huggingface_name, index) for huggingface_name, our_names in self.sources.items() for index, name in enumerate(our_names)
        }

    @property
    def base_model_prefix(self) -> str:
        """Common prefix of all tensor names except that of the head."""
        return self._names.layer_prefix.partition(".")[0] + "."

    @property
    def head_name(self) -> str:
        """Name of the head's weight. This tensor is optional if the head is tied to the embedding."""
        return f"{self._names.top_level['head']}.weight"

    @property
    def embeddings_name(self) -> str:
        """Name of the weight of the token embeddings."""
        return f"{self._names.top_level['embedding']}.weight"

    @property
    def position_embeddings_name(self) -> str | None:
        """Name of the learned position embeddings; None if there are none. This tensor may have more positions than a training sample."""
        return next((huggingface_name for huggingface_name, our_names in self.sources.items() if our_names == ["positions.weight"]), None)

    def find_unfused_tensor_name(self, parameter_name: str) -> str | None:
        """Return the name of the family's tensor that equals `parameter_name`; None if that tensor is fused or transposed."""
        huggingface_name, _ = self._locations[parameter_name]
        return huggingface_name if len(self.sources[huggingface_name]) == 1 and not self._is_transposed(huggingface_name) else None

    def compute_tensor_shape(self, huggingface_name: str) -> tuple[int, ...]:
        """Return the shape of the family's tensor `huggingface_name`."""
        rows, *columns = zip(*(self._sizes[name] for name in self.sources[huggingface_name]), strict=True)
        fused_size = (sum(rows), *(dimension[0] for dimension in columns))
        return fused_size[::-1] if self._is_transposed(huggingface_name) else fused_size

    def fuse_parameters(self, huggingface_name: str, parameters: Sequence[Tensor]) -> Tensor:
        """Return the family's tensor `huggingface_name`, built from the swarmtrain `parameters` that it consists of."""
        if self._names.interleaves_heads and len(parameters) > 1:
            heads, size = self._shape.num_attention_heads, self._shape.head_size
            return torch.stack([parameter.reshape(heads, size, *parameter.shape[1:]) for parameter in parameters], dim=1).flatten(0, 2)
        tensor = torch.cat(list(parameters)) if len(parameters) > 1 else parameters[0]
        return tensor.T if self._is_transposed(huggingface_name) else tensor

    def extract_parameter(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the swarmtrain parameter `name`, extracted from the family's `tensors`; a view of a tensor if possible."""
        huggingface_name, index = self._locations[name]
        tensor, count = tensors[huggingface_name], len(self.sources[huggingface_name])
        if self._names.interleaves_heads and count > 1:
            size = self._shape.head_size
            return tensor.reshape(self._shape.num_attention_heads, count, size, *tensor.shape[1:])[:, index].flatten(0, 1)
        tensor = tensor.T if self._is_transposed(huggingface_name) else tensor
        return tensor.chunk(count)[index][: self._sizes[name][0]]

    def _is_transposed(self, huggingface_name: str) -> bool:
        """Return whether the family stores the tensor `huggingface_name` transposed."""
        return (
            self._names.transposes
            and huggingface_name.startswith(self._names.layer_prefix)
            and len(self._sizes[self.sources[huggingface_name][0]]) > 1
        )

    def _map_parameter_name(self, name: str) -> str:
        module, _, suffix = name.rpartition(".")
        if not module.startswith("blocks."):
            return f"{self._names.top_level[module]}.{suffix}"
        _, layer, layer_module = module.split(".", 2)
        return f"{self._names.layer_prefix}.{layer}.{self._names.per_layer[layer_module]}.{suffix}"


def exclude_buffer_names(names: Iterable[str]) -> list[str]:
    """Return `names` without the names of buffers, which some models save although they can be computed."""
    return [name for name in names if not name.endswith(_BUFFER_SUFFIXES)]
