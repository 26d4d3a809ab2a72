"""What a rank of a world does that is judged by tasks: asked.json in its folder says by which."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarmtrain.trainer.use import evaluate


def main() -> None:
    sys.exit(evaluate.main(json.loads(Path("asked.json").read_text())))
