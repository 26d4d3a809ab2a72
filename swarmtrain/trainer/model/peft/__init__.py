"""Parameters added to a model for fine-tuning (PEFT), recognized by their names: LoRA, adapters, and projections of an embedding head.

LoRA and adapters initially do not change the model's output. If a model has added parameters, only they are trained, unless
trainer.finetunable_parameters selects others.
"""

from __future__ import annotations

LORA_KEY, ADAPTER_KEY = ".lora.", ".adapter."
_PROJECTION_HEAD_PREFIX = "head.projections."


def is_peft_parameter(name: str) -> bool:
    """Return whether the parameter `name` was added for fine-tuning and does not belong to the base model."""
    return LORA_KEY in name or ADAPTER_KEY in name or name.startswith(_PROJECTION_HEAD_PREFIX)
