"""Verbs that need torch, or numpy: `python -m swarmtrain.trainer VERB`.

bench       how fast a config trains here, for people; also under torchrun
data        token files: what `swarmtrain data` starts
export, sample, embed, evaluate
            what our own commands of these names start, once a rank: they read what is asked from standard input as JSON, and have
            the terminal
memory      for our own command line, which never imports torch: reads its question from standard input as JSON, and answers on
            standard output as JSON, {"error": …} where it cannot
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
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


_COMMANDS = {
    "export": "swarmtrain.trainer.huggingface.command",
    "sample": "swarmtrain.trainer.use.sample",
    "embed": "swarmtrain.trainer.use.embed",
    "evaluate": "swarmtrain.trainer.use.evaluate",
}
VERBS = {"memory": memory}


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
    if name in _COMMANDS and not rest:
        return int(importlib.import_module(_COMMANDS[name]).main(json.load(sys.stdin)))
    if name not in VERBS or rest:
        sys.stderr.write(f"usage: python -m swarmtrain.trainer bench CONFIG, or {'|'.join((*VERBS, *_COMMANDS))} < question.json\n")
        return EXIT_USAGE
    try:
        answer = VERBS[name](json.load(sys.stdin))
    except SwarmtrainError as error:
        answer = {"error": {"message": error.message, "place": error.place, "hint": error.hint}}
    sys.stdout.write(json.dumps(answer))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
