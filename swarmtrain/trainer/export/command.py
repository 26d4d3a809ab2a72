"""`python -m swarmtrain.trainer export`: the command that `swarmtrain export` starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.export.adapter_export import export_lora_adapter
from swarmtrain.trainer.export.checkpoint_export import export_checkpoint


@handle_cli_errors
def main(request: dict[str, Any]) -> None:
    """Export a checkpoint as a Hugging Face folder, as described by `request`. Raises SwarmtrainError."""
    source, output, dtype = Path(request["source"]), Path(request["output"]), request["dtype"]
    base = Path(request["base"]) if request["base"] else None
    if request["adapter"]:
        report = export_lora_adapter(source, output, dtype=dtype)
    else:
        tokenizer = Path(request["tokenizer"]) if request["tokenizer"] else None
        report = export_checkpoint(source, output, base_model=base, dtype=dtype, shard_bytes=request["shard_bytes"], tokenizer=tokenizer)
    if request["json"]:
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    sys.stderr.write(f"wrote {output}: {report['family']}, {report['parameters']:,} parameters, as of step {report['step']}\n")
