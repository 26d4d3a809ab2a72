"""Verbs that need torch, or numpy: `python -m swarmtrain.trainer VERB`.

bench       how fast a config trains here, for people; also under torchrun
data        token files: what `swarmtrain data` starts
sample, evaluate
            text from a model, and its held-out loss: what `swarmtrain sample` and `evaluate` start, also under torchrun
memory, export
            for our own command line, which never imports torch: they read their question from standard input as JSON, and answer
            on standard output as JSON, {"error": …} where they cannot
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import EXIT_OK, EXIT_USAGE, SwarmtrainError
from swarmtrain.trainer.ending import verb


def memory(question: dict[str, Any]) -> dict[str, Any]:
    """Return what a config needs on each kind of rank, and, if that is more than `room` bytes, what changes would need."""
    from swarmtrain.trainer.memory import alternatives, needs

    config, size, room = Config.from_json(question["config"]), question["ranks"], question["room"]
    found = needs(config, size)
    answer: dict[str, Any] = {"ranks": [need.to_dict() for need in found], "alternatives": []}
    if room is not None and max(need.peak for need in found) > room:
        for changes, changed in alternatives(config, size):
            answer["alternatives"].append({"changes": changes, "peak": max(need.peak for need in changed)})
    return answer


def export(question: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint as a folder of Hugging Face's, and return what it is."""
    from swarmtrain.trainer.huggingface.export import export

    source, output = Path(question["source"]), Path(question["output"])
    if question["adapter"]:
        from swarmtrain.trainer.huggingface.adapter import export_adapter

        return export_adapter(source, output, dtype=question["dtype"])
    tokenizer = Path(question["tokenizer"]) if question["tokenizer"] else None
    return export(source, output, dtype=question["dtype"], shard_bytes=question["shard_bytes"], tokenizer=tokenizer)


VERBS = {"memory": memory, "export": export}


@verb
def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for, and return the exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if name == "bench":
        from swarmtrain.trainer import bench

        return bench.main(rest)
    if name == "data":
        from swarmtrain.trainer.prepare import command

        return command.main(rest)
    if name == "sample":
        from swarmtrain.trainer.use import sample

        return sample.main(rest)
    if name == "evaluate":
        from swarmtrain.trainer.use import evaluate

        return evaluate.main(rest)
    if name not in VERBS or rest:
        sys.stderr.write(f"usage: python -m swarmtrain.trainer bench CONFIG, or {'|'.join(VERBS)} < question.json\n")
        return EXIT_USAGE
    try:
        answer = VERBS[name](json.load(sys.stdin))
    except SwarmtrainError as error:
        answer = {"error": {"message": error.message, "place": error.place, "hint": error.hint}}
    sys.stdout.write(json.dumps(answer))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
