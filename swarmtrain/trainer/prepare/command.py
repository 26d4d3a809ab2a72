"""`python -m swarmtrain.trainer data VERB OPTIONS FILE...`: what our own command line starts; OPTIONS is JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.data import Format
from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, SwarmtrainError, TrainingError
from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.prepare.job import prepare
from swarmtrain.trainer.prepare.options import Options
from swarmtrain.trainer.prepare.verify import verify


@verb
def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for, and return the exit code. Raises SwarmtrainError."""
    if len(argv) < 2 or argv[0] not in _VERBS:
        sys.stderr.write(f"usage: python -m swarmtrain.trainer data {'|'.join(_VERBS)} OPTIONS [FILE...]\n")
        return EXIT_USAGE
    return _VERBS[argv[0]](json.loads(argv[1]), argv[2:])


def _prepare(options: dict[str, Any], names: Sequence[str]) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are processes for it
    asked = Options(**options)
    asked = replace(asked, workers=asked.workers or len(os.sched_getaffinity(0)))
    try:
        meta = prepare(asked, names)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: what is done stays; the same command goes on from here\n")
        return EXIT_INTERRUPTED
    prepared = meta["prepared"]["tokenizer"]
    counted = f", of which {meta['counted_tokens']:,} count in the loss" if "counted_tokens" in meta else ""
    size = Path(f"{asked.prefix}.bin").stat().st_size
    sys.stdout.write(
        f"{asked.prefix}: {meta['document_count']:,} documents, {meta['token_count']:,} tokens{counted}, {size / 1e6:,.1f} MB\n"
    )
    sys.stderr.write(f"next: data.data_prefixes: [{asked.prefix}], transformer_architecture.vocab_size: {prepared['vocab_size']} or more\n")
    return EXIT_OK


def _verify(options: dict[str, Any], names: Sequence[str]) -> int:
    if options["format"] not in list(Format):
        raise TrainingError(f"{options['format']!r} is none of {', '.join(Format)}", place="data verify --format")
    code = EXIT_OK
    for name in names:
        try:
            told = verify(Path(name), format=Format(options["format"]), document_token=options["document_token"])
            sys.stdout.write(f"{told}\n")
        except SwarmtrainError as error:
            sys.stderr.write(error.text)
            code = error.exit_code
    return code


def _inspect(options: dict[str, Any], _: Sequence[str]) -> int:
    from swarmtrain.trainer.prepare.look import look

    for sample in look(Config.from_json(options["config"]), options["samples"], options["tokenizer"]):
        sys.stdout.write(f"{sample}\n")
    return EXIT_OK


_VERBS = {"prepare": _prepare, "verify": _verify, "inspect": _inspect}
