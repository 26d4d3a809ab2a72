"""Entry point of a rank that generates samples; asked.json in its working directory has the arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarmtrain.trainer.inference import sample_command


def main() -> None:
    sys.exit(sample_command.main(json.loads(Path("asked.json").read_text())))
