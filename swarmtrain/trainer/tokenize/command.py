"""`python -m swarmtrain.trainer data VERB OPTIONS FILE...`: the command that `swarmtrain data` starts.

VERB is tokenize, verify or inspect. OPTIONS is a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.data import TokenFileFormat
from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, SwarmtrainError, TrainingError
from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.tokenize.pipeline import tokenize_source_files
from swarmtrain.trainer.tokenize.tokenize_options import TokenizeOptions
from swarmtrain.trainer.tokenize.verification import verify_token_files


@handle_cli_errors
def main(argv: Sequence[str]) -> int:
    """Run the data command that `argv` names, and return its exit code. Raises SwarmtrainError."""
    if len(argv) < 2 or argv[0] not in _COMMANDS:
        sys.stderr.write(f"usage: python -m swarmtrain.trainer data {'|'.join(_COMMANDS)} OPTIONS [FILE...]\n")
        return EXIT_USAGE
    return _COMMANDS[argv[0]](json.loads(argv[1]), argv[2:])


def _run_tokenize_command(option_values: dict[str, Any], path_patterns: Sequence[str]) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker pool runs in parallel already
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn that torch is not installed, which is not needed
    options = TokenizeOptions(**option_values)
    options = replace(options, workers=options.workers or len(os.sched_getaffinity(0)))
    try:
        meta = tokenize_source_files(options, path_patterns)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: finished shards are kept; run the same command again to resume\n")
        return EXIT_INTERRUPTED
    tokenizer_facts = meta["prepared"]["tokenizer"]
    loss_tokens_text = f", of which {meta['loss_tokens']:,} are loss tokens" if "loss_tokens" in meta else ""
    size = Path(f"{options.prefix}.bin").stat().st_size
    sys.stdout.write(
        f"{options.prefix}: {meta['document_count']:,} documents, {meta['token_count']:,} tokens{loss_tokens_text}, {size / 1e6:,.1f} MB\n"
    )
    sys.stderr.write(
        f"next: data.data_prefixes: [{options.prefix}], transformer_architecture.vocab_size: {tokenizer_facts['vocab_size']} or more\n"
    )
    return EXIT_OK


def _run_verify_command(options: dict[str, Any], prefixes: Sequence[str]) -> int:
    if options["format"] not in list(TokenFileFormat):
        raise TrainingError(f"{options['format']!r} is not one of {', '.join(TokenFileFormat)}", place="data verify --format")
    code = EXIT_OK
    for name in prefixes:
        try:
            summary = verify_token_files(Path(name), format=TokenFileFormat(options["format"]), document_token=options["document_token"])
            _print_value(summary, as_json=options["json"])
        except SwarmtrainError as error:
            sys.stderr.write(error.plain_text)
            code = error.exit_code
    return code


def _run_inspect_command(options: dict[str, Any], _: Sequence[str]) -> int:
    from swarmtrain.trainer.tokenize.sample_inspection import describe_samples

    for sample in describe_samples(Config.from_json(options["config"]), options["samples"], options["tokenizer"]):
        _print_value(sample, as_json=options["json"])
    return EXIT_OK


def _print_value(value: Any, *, as_json: bool) -> None:
    """Print a dataclass instance as text, or as one line of JSON."""
    sys.stdout.write(f"{json.dumps(asdict(value)) if as_json else value}\n")


_COMMANDS = {"tokenize": _run_tokenize_command, "verify": _run_verify_command, "inspect": _run_inspect_command}
