"""Entry point of a rank that evaluates a model on tasks; asked.json in its working directory has the arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarmtrain.trainer.inference import evaluation


def main() -> None:
    sys.exit(evaluation.main(json.loads(Path("asked.json").read_text())))
