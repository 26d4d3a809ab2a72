"""`data`: training and validation data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from swarmtrain.config.schema.section import Section, build_field_error


class Packing(StrEnum):
    """How documents are packed into samples."""

    stream = "stream"
    documents = "documents"


class TokenFileFormat(StrEnum):
    """Formats of token files."""

    auto = "auto"
    memory_map = "memory_map"
    megatron = "megatron"
    llm_c = "llm.c"
    nanogpt = "nanogpt"


class BlendedDatasetConfig(Section):
    """Weights by which several token files are blended. If none of the three kinds of weights is set, the files are concatenated."""

    weights: tuple[float, ...] | None = Field(
        None,
        description="Sampling weight of each of data_prefixes, in order, as a fraction of samples. They need not add up to "
        "1. null: not weighted explicitly.",
    )
    weight_by_num_documents: bool = Field(False, description="Weight files by their number of documents.")
    weighted_sampler_alpha: float = Field(
        1.0,
        ge=0,
        le=16,
        description="Exponent of the number of documents, for weight_by_num_documents. 0: equal weights; below 1: small "
        "files are oversampled.",
    )
    weight_examples_proportional: bool = Field(
        False, description="Weight files by their number of documents, capped at ep_maximum, to the power of 1 / ep_temperature, as for T5."
    )
    ep_maximum: int | None = Field(
        None, ge=1, description="Cap on the number of documents per file, for weight_examples_proportional. null: no cap."
    )
    ep_temperature: float = Field(
        1.0, ge=0.0625, description="Temperature, for weight_examples_proportional. Above 1: small files are oversampled."
    )

    @property
    def is_enabled(self) -> bool:
        """Whether token files are blended by weight."""
        return self.weights is not None or self.weight_by_num_documents or self.weight_examples_proportional

    @model_validator(mode="after")
    def _check_blend_weights(self) -> BlendedDatasetConfig:
        for position, weight in enumerate(self.weights or ()):
            if not 1e-9 <= weight <= 1e9:
                raise build_field_error(
                    "weights", f"has {weight} at index {position}", "use positive weights; remove a prefix that should not be read"
                )
        if (self.weights is not None) + self.weight_by_num_documents + self.weight_examples_proportional > 1:
            raise build_field_error(
                "weights", "weights, weight_by_num_documents and weight_examples_proportional are mutually exclusive", "keep one"
            )
        if self.weighted_sampler_alpha != 1 and not self.weight_by_num_documents:
            raise build_field_error(
                "weighted_sampler_alpha", "has an effect only with weight_by_num_documents", "add weight_by_num_documents: true"
            )
        if (self.ep_maximum is not None or self.ep_temperature != 1) and not self.weight_examples_proportional:
            name = "ep_temperature" if self.ep_maximum is None else "ep_maximum"
            raise build_field_error(name, "has an effect only with weight_examples_proportional", "add weight_examples_proportional: true")
        return self


class DataConfig(Section):
    """Training and validation data: memory-mapped token files.

    A file prefix P stands for P.bin (tokens), P.idx (documents) and P.meta.json. Other formats have only some of these files.
    """

    data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the training token files.")
    validation_data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the validation token files. They are never blended.")
    rejected_prefixes: tuple[Path, ...] = Field(
        (),
        description="Rejected responses for trainer.preference_config, one prefix per data_prefixes entry: document i is "
        "the rejected counterpart of document i there.",
    )
    validation_rejected_prefixes: tuple[Path, ...] = Field((), description="Rejected responses for validation_data_prefixes.")
    positive_prefixes: tuple[Path, ...] = Field(
        (),
        description="Positive texts for trainer.contrastive_config, one prefix per data_prefixes entry: document i is "
        "the match of query i there.",
    )
    negative_prefixes: tuple[Path, ...] = Field(
        (),
        description="Hard negatives for positive_prefixes, one or more prefixes per data_prefixes entry: document i does "
        "not match query i. List a first one for every entry, then a second one.",
    )
    validation_positive_prefixes: tuple[Path, ...] = Field((), description="Positive texts for validation_data_prefixes.")
    validation_negative_prefixes: tuple[Path, ...] = Field(
        (), description="Hard negatives for validation_data_prefixes, as many per entry as in training."
    )
    format: TokenFileFormat = Field(
        TokenFileFormat.auto,
        description="Format of all token files. auto: detected from the files at each prefix. nanogpt has no header and "
        "must be set explicitly.",
    )
    document_token: int | None = Field(
        None,
        ge=0,
        description="Token that ends each document (nanogpt) or begins it (llm.c), as these formats have no index. null: "
        "each file is one document.",
    )
    allow_different_tokenizers: bool = Field(
        False, description="Train although token files, or the model in trainer.init_from, record different tokenizers."
    )
    use_mmap: bool = Field(
        True, description="Memory-map the files. false: read them, and retry for some seconds if a network file system fails."
    )
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of each training file, its last documents, that is used for validation if there are no "
        "validation_data_prefixes.",
    )
    packing: Packing = Field(
        Packing.stream,
        description="stream: samples are windows over all tokens. documents: whole documents, several per sample, padded.",
    )
    blended_dataset: BlendedDatasetConfig = Field(
        BlendedDatasetConfig(), description="Blend several data_prefixes by weight, each with its own epochs."
    )

    @model_validator(mode="after")
    def _check_blending_and_validation(self) -> DataConfig:
        weights = self.blended_dataset.weights
        if weights is not None and len(weights) != len(self.data_prefixes):
            raise build_field_error(
                "blended_dataset", f"has {len(weights)} weights for {len(self.data_prefixes)} data_prefixes", "give one weight per prefix"
            )
        if self.blended_dataset.is_enabled and len(self.data_prefixes) > MAX_BLENDED_FILES:
            raise build_field_error(
                "blended_dataset", f"{len(self.data_prefixes)} data_prefixes exceed the blending limit of {MAX_BLENDED_FILES}"
            )
        if self.validation_fraction and self.validation_data_prefixes:
            raise build_field_error("validation_fraction", "is not used if validation_data_prefixes is set", "keep one of them")
        return self

    @model_validator(mode="after")
    def _check_companion_prefixes(self) -> DataConfig:
        if self.rejected_prefixes and self.positive_prefixes:
            raise build_field_error(
                "positive_prefixes",
                "cannot be combined with rejected_prefixes: they belong to different training objectives",
                "keep one of them",
            )
        if self.negative_prefixes and not self.positive_prefixes:
            raise build_field_error("negative_prefixes", "need positive_prefixes")
        for kind in _COMPANION_KINDS:
            ratios = []
            for name in ("", "validation_"):
                companion_count, data_count = (len(getattr(self, f"{name}{each}_prefixes")) for each in (kind, "data"))
                if companion_count and (
                    not data_count or companion_count % data_count or (companion_count > data_count and kind != "negative")
                ):
                    raise build_field_error(
                        f"{name}{kind}_prefixes",
                        f"has {companion_count} entries for {data_count} {name}data_prefixes",
                        "list one entry for each data prefix",
                    )
                ratios.append(companion_count // data_count if data_count else 0)
            if self.validation_data_prefixes and ratios[0] != ratios[1]:
                reason = (
                    f"has {ratios[1]} per data prefix, but {kind}_prefixes has {ratios[0]}" if ratios[1] else "are missing, but there are"
                )
                raise build_field_error(f"validation_{kind}_prefixes", reason if ratios[1] else f"{reason} {kind}_prefixes")
        return self

    def collect_companion_prefixes(self, *, for_validation: bool = False) -> tuple[tuple[Path, ...], ...]:
        """Return the prefixes of the companion token files, with the rejected, positive and negative texts for the data prefixes.

        There is one tuple per companion row of a sample, in this order. Its prefixes correspond by index to data_prefixes, or to
        validation_data_prefixes if `for_validation` is set.
        """
        if for_validation:
            count = len(self.validation_data_prefixes)
            prefixes = (*self.validation_rejected_prefixes, *self.validation_positive_prefixes, *self.validation_negative_prefixes)
        else:
            count = len(self.data_prefixes)
            prefixes = (*self.rejected_prefixes, *self.positive_prefixes, *self.negative_prefixes)
        return tuple(tuple(prefixes[first : first + count]) for first in range(0, len(prefixes), max(1, count)))

    @property
    def rows_per_sample(self) -> int:
        """Number of rows (texts) per sample, which are processed together."""
        return 1 + len(self.collect_companion_prefixes())


_COMPANION_KINDS = ("rejected", "positive", "negative")
MAX_BLENDED_FILES = 4096
"""Maximum number of files in one blend."""
