"""`python -m swarmtrain.trainer export`: what our own command line starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.huggingface.adapter import export_adapter
from swarmtrain.trainer.huggingface.export import export


@verb
def main(question: dict[str, Any]) -> None:
    """Write a checkpoint as a folder of Hugging Face's. Raises SwarmtrainError."""
    source, output, dtype = Path(question["source"]), Path(question["output"]), question["dtype"]
    base = Path(question["base"]) if question["base"] else None
    if question["adapter"]:
        made = export_adapter(source, output, dtype=dtype)
    else:
        tokenizer = Path(question["tokenizer"]) if question["tokenizer"] else None
        made = export(source, output, base=base, dtype=dtype, shard_bytes=question["shard_bytes"], tokenizer=tokenizer)
    if question["json"]:
        sys.stdout.write(f"{json.dumps(made, indent=2)}\n")
    sys.stderr.write(f"wrote {output}: {made['family']}, {made['parameters']:,} parameters, as of step {made['step']}\n")
