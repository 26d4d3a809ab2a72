"""`data`: what is read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, wrong


class Packing(StrEnum):
    """How documents become samples."""

    stream = "stream"
    documents = "documents"


class BlendedDatasetConfig(Section):
    """Token files blended by weight. Each has epochs of its own."""

    weights: tuple[float, ...] | None = Field(
        None, description="Share of each of data_prefixes, in their order; they need not add up to one. null: by documents."
    )
    weight_by_num_documents: bool | None = Field(
        None, description="Weights are the numbers of documents. null: unless weights or weight_examples_proportional are set."
    )
    weighted_sampler_alpha: float = Field(
        1.0,
        ge=0,
        le=16,
        description="Power of the number of documents. 0: all alike; below 1: small files come more often than they are large.",
    )
    weight_examples_proportional: bool = Field(
        False, description="Weights are the numbers of documents up to ep_maximum, to the power of 1 / ep_temperature, as for T5."
    )
    ep_maximum: int | None = Field(None, ge=1, description="Documents of a file that count at most. null: all.")
    ep_temperature: float = Field(1.0, ge=0.0625, description="Above 1: small files come more often than they are large.")

    @model_validator(mode="after")
    def _one_way(self) -> BlendedDatasetConfig:
        for position, weight in enumerate(self.weights or ()):
            if not 1e-9 <= weight <= 1e9:
                raise wrong(
                    "weights", f"has {weight} as number {position}", "weights are positive; leave out the prefix that shall not be read"
                )
        ways = (self.weights is not None, bool(self.weight_by_num_documents), self.weight_examples_proportional)
        if sum(ways) > 1:
            raise wrong("weights", "weights, weight_by_num_documents and weight_examples_proportional exclude each other", "keep one")
        if not any(ways) and self.weight_by_num_documents is False:
            raise wrong("weight_by_num_documents", "is false, and nothing else says what the weights are", "add weights: [0.7, 0.3]")
        return self


class DataConfig(Section):
    """Memory-mapped token files. A prefix P stands for P.bin (tokens), P.idx (documents) and P.meta.json."""

    data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the training data.")
    validation_data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the held-out data. It is never blended.")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Part of each training file, its last documents, that is held out if there are no validation_data_prefixes.",
    )
    packing: Packing = Field(
        Packing.stream,
        description="stream: samples are windows over all tokens. documents: whole documents, several to a sample, filled up with nothing.",
    )
    blended_dataset: BlendedDatasetConfig | None = Field(
        None, description="Read several data_prefixes by weight. null: they are one set, each token once an epoch."
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> DataConfig:
        given = self.blended_dataset.weights if self.blended_dataset else None
        if given is not None and len(given) != len(self.data_prefixes):
            raise wrong(
                "blended_dataset", f"has {len(given)} weights for {len(self.data_prefixes)} data_prefixes", "give each prefix its own"
            )
        if self.blended_dataset and len(self.data_prefixes) > MOST_SETS:
            raise wrong("blended_dataset", f"{len(self.data_prefixes)} data_prefixes are more than can be blended: {MOST_SETS}")
        if self.validation_fraction and self.validation_data_prefixes:
            raise wrong("validation_fraction", "is not used where there are validation_data_prefixes", "keep one of them")
        return self


MOST_SETS = 4096
"""Files that one blend can have."""
