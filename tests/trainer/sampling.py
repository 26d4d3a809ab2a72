"""What a rank of a world does that samples: asked.json in its folder says what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarmtrain.trainer.use import sample


def main() -> None:
    sys.exit(sample.main(json.loads(Path("asked.json").read_text())))
