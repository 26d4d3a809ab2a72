"""Import a Hugging Face model's config.json: its architecture, and the model itself as initial weights."""

from __future__ import annotations

from swarmtrain.config import huggingface_config
from swarmtrain.importers.migration_report import MigrationReport, UnmappedReason

KEYS = frozenset(("model_type", "architectures"))
_PRECISIONS = ("float32", "bfloat16")
_UNMAPPED_KEYS = {
    "architectures": (UnmappedReason.done_differently, "given by the fields of transformer_architecture"),
    "model_type": (UnmappedReason.done_differently, "given by the fields of transformer_architecture"),
    "initializer_range": (UnmappedReason.done_differently, "docs/explanation/model.md describes the initialization of parameters"),
    "use_cache": (UnmappedReason.no_counterpart, "the KV cache is for generation, not for training"),
    "bos_token_id": (UnmappedReason.done_differently, "swarmtrain data tokenize begins each document as the tokenizer says"),
    "eos_token_id": (
        UnmappedReason.done_differently,
        "swarmtrain data tokenize sets the token that ends a document; with init_from, generation ends with this one, too",
    ),
    "pad_token_id": (UnmappedReason.no_counterpart, "not needed: padded positions are masked in the loss"),
    "transformers_version": (UnmappedReason.no_counterpart, ""),
}


def map_huggingface_config(report: MigrationReport, source_file: str, model_folder: str | None) -> None:
    """Map the config.json read from `source_file` to config fields.

    `model_folder` is the file's folder if it also contains the model's weights.
    Raises SwarmtrainError if the model's architecture is not supported.
    """
    architecture_values = huggingface_config.read_architecture_values(report.source, source_file)
    model_family = huggingface_config.read_model_family(report.source, source_file)
    has_rope_parameters = isinstance(report.get_source_value("rope_parameters"), dict)
    hf_keys = {field.config_path: field.hf_key for field in model_family.field_mappings}
    for path, value in architecture_values.items():
        hf_key = hf_keys.get(path, "")
        if has_rope_parameters and not report.has_source_key(hf_key):
            hf_key = "rope_parameters" if path.startswith("rotary") else hf_key
        if hf_key and report.has_source_key(hf_key):
            report.map_key(hf_key, f"transformer_architecture.{path}", value)
        else:
            report.set_config_value(f"transformer_architecture.{path}", value)
    _map_precision(report)
    for key, unmapped in _UNMAPPED_KEYS.items():
        if report.has_source_key(key):
            report.add_unmapped_key(key, *unmapped)
    report.mark_keys_handled(*(key for key in model_family.required_values if report.has_source_key(key)))
    if model_folder:
        report.set_config_value("trainer.init_from", model_folder)
        report.add_note("trainer.init_from is the model folder on this machine: it must exist at this path on every node")
    else:
        report.add_note(
            "there are no weights next to config.json: set trainer.init_from to the model folder, or train from random initialization"
        )
    report.add_note("transformer_architecture.sequence_length is the maximum that the model supports: shorter samples cost less")


def _map_precision(report: MigrationReport) -> None:
    for key in ("dtype", "torch_dtype"):
        if report.get_source_value(key) in _PRECISIONS:
            report.map_key(key, "transformer_architecture.precision")
        elif report.has_source_key(key):
            report.add_unmapped_key(
                key,
                UnmappedReason.done_differently,
                "transformer_architecture.precision is the training precision: use bfloat16 if the devices support it",
            )
