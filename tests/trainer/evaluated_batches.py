"""Entry point of a rank that evaluates a model several times; asked.json in its working directory has port and arguments of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from swarmtrain.trainer.inference import evaluation


def main() -> None:
    for request in json.loads(Path("asked.json").read_text()):
        os.environ["MASTER_PORT"] = str(request["port"])  # the store of the evaluation before may still occupy its port
        if code := evaluation.main(request["arguments"]):
            sys.exit(code)
