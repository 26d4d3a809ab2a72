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


class Format(StrEnum):
    """What token files are."""

    auto = "auto"
    memory_map = "memory_map"
    megatron = "megatron"
    llm_c = "llm.c"
    nanogpt = "nanogpt"


class BlendedDatasetConfig(Section):
    """How several token files are blended. Unless one of the three ways to weigh them is set, they are one set."""

    weights: tuple[float, ...] | None = Field(
        None, description="Share of each of data_prefixes, in their order, by samples; they need not add up to one."
    )
    weight_by_num_documents: bool = Field(False, description="Weights are the numbers of documents.")
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

    @property
    def enabled(self) -> bool:
        """True if files are blended."""
        return self.weights is not None or self.weight_by_num_documents or self.weight_examples_proportional

    @model_validator(mode="after")
    def _one_way(self) -> BlendedDatasetConfig:
        for position, weight in enumerate(self.weights or ()):
            if not 1e-9 <= weight <= 1e9:
                raise wrong(
                    "weights", f"has {weight} as number {position}", "weights are positive; leave out the prefix that shall not be read"
                )
        if (self.weights is not None) + self.weight_by_num_documents + self.weight_examples_proportional > 1:
            raise wrong("weights", "weights, weight_by_num_documents and weight_examples_proportional exclude each other", "keep one")
        if self.weighted_sampler_alpha != 1 and not self.weight_by_num_documents:
            raise wrong("weighted_sampler_alpha", "is a power of the number of documents", "add weight_by_num_documents: true")
        if (self.ep_maximum is not None or self.ep_temperature != 1) and not self.weight_examples_proportional:
            name = "ep_temperature" if self.ep_maximum is None else "ep_maximum"
            raise wrong(name, "is of weights by examples", "add weight_examples_proportional: true")
        return self


class DataConfig(Section):
    """Memory-mapped token files. A prefix P stands for P.bin (tokens), P.idx (documents) and P.meta.json; other formats have fewer."""

    data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the training data.")
    validation_data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the held-out data. It is never blended.")
    rejected_prefixes: tuple[Path, ...] = Field(
        (),
        description="For trainer.preference_config: one for each of data_prefixes, whose document i loses to document i there.",
    )
    validation_rejected_prefixes: tuple[Path, ...] = Field((), description="The same for validation_data_prefixes.")
    positive_prefixes: tuple[Path, ...] = Field(
        (), description="For trainer.contrastive_config: one for each of data_prefixes, whose document i is the answer to document i there."
    )
    negative_prefixes: tuple[Path, ...] = Field(
        (),
        description="Beside them, one or several for each of data_prefixes, whose document i is none: first one for each, then another.",
    )
    validation_positive_prefixes: tuple[Path, ...] = Field((), description="The answers to validation_data_prefixes.")
    validation_negative_prefixes: tuple[Path, ...] = Field((), description="What is none to them, as many for each as in training.")
    format: Format = Field(
        Format.auto,
        description="auto: what lies under each prefix tells. nanogpt, which has no header, must be said. It goes for all prefixes.",
    )
    document_token: int | None = Field(
        None,
        ge=0,
        description="Token that ends each document of nanogpt, or begins each of llm.c: they have no index. null: a file is one document.",
    )
    use_mmap: bool = Field(
        True, description="Map files into memory. false: read them, and try again for some seconds when a network's disk fails to answer."
    )
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
    blended_dataset: BlendedDatasetConfig = Field(
        BlendedDatasetConfig(), description="Several data_prefixes by weight, each with epochs of its own."
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> DataConfig:
        given = self.blended_dataset.weights
        if given is not None and len(given) != len(self.data_prefixes):
            raise wrong(
                "blended_dataset", f"has {len(given)} weights for {len(self.data_prefixes)} data_prefixes", "give each prefix its own"
            )
        if self.blended_dataset.enabled and len(self.data_prefixes) > MOST_SETS:
            raise wrong("blended_dataset", f"{len(self.data_prefixes)} data_prefixes are more than can be blended: {MOST_SETS}")
        if self.validation_fraction and self.validation_data_prefixes:
            raise wrong("validation_fraction", "is not used where there are validation_data_prefixes", "keep one of them")
        return self

    @model_validator(mode="after")
    def _each_has_its_own(self) -> DataConfig:
        if self.rejected_prefixes and self.positive_prefixes:
            raise wrong("positive_prefixes", "excludes rejected_prefixes: they are for two ways to learn", "keep one of them")
        if self.negative_prefixes and not self.positive_prefixes:
            raise wrong("negative_prefixes", "are beside positive_prefixes, and there are none")
        for kind in _BESIDE:
            times = []
            for name in ("", "validation_"):
                given, count = (len(getattr(self, f"{name}{each}_prefixes")) for each in (kind, "data"))
                if given and (not count or given % count or (given > count and kind != "negative")):
                    raise wrong(f"{name}{kind}_prefixes", f"are {given} for {count} {name}data_prefixes", "give each its own")
                times.append(given // count if count else 0)
            if self.validation_data_prefixes and times[0] != times[1]:
                reason = f"are {times[1]} for each, and {kind}_prefixes {times[0]}" if times[1] else "are missing, and there are"
                raise wrong(f"validation_{kind}_prefixes", reason if times[1] else f"{reason} {kind}_prefixes")
        return self

    def beside(self, *, held_out: bool = False) -> tuple[tuple[Path, ...], ...]:
        """Return what goes with data_prefixes, or with those of held-out data: lists as long as they are, of the other rows of samples."""
        if held_out:
            count = len(self.validation_data_prefixes)
            given = (*self.validation_rejected_prefixes, *self.validation_positive_prefixes, *self.validation_negative_prefixes)
        else:
            count = len(self.data_prefixes)
            given = (*self.rejected_prefixes, *self.positive_prefixes, *self.negative_prefixes)
        return tuple(tuple(given[first : first + count]) for first in range(0, len(given), max(1, count)))

    @property
    def rows(self) -> int:
        """Rows of a sample: texts that are seen together."""
        return 1 + len(self.beside())


_BESIDE = ("rejected", "positive", "negative")
MOST_SETS = 4096
"""Files that one blend can have."""
