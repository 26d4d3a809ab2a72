"""`swarmtrain data`: write token files from text, verify and inspect them."""

from enum import Enum
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFileArgument, JsonLinesOption, OverridesOption

app = typer.Typer(no_args_is_help=True)


class BadRecordPolicy(Enum):
    """How to handle an invalid record."""

    stop = "stop"
    skip = "skip"
    count = "count"


@app.command("tokenize")
def tokenize_files(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="JSONL, JSON, CSV, TSV, Parquet, or texts (one document per file), also compressed; globs such as 'data/**'.",
        ),
    ],
    *,
    output_prefix: Annotated[
        str, typer.Option("--to", metavar="PREFIX", help="Prefix of the output: PREFIX.bin, PREFIX.idx and PREFIX.meta.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json or its folder; or bytes, for one token per byte.")
    ],
    text_key: Annotated[
        str | None,
        typer.Option(
            "--key", help="Field with the text or the messages of a record. Default: text; with --chat, found.", show_default=False
        ),
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option("--prompt-key", help="Field with the prompt, which is masked in the loss.", show_default=False)
    ] = None,
    completion_key: Annotated[
        str | None,
        typer.Option(
            "--completion-key", help="Field with the completion of the prompt; its tokens are the loss tokens.", show_default=False
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Records are conversations; only the assistant's messages are loss tokens.")] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="FILE",
            help="A tokenizer_config.json or a Jinja template. Default: the one next to the tokenizer, else ChatML.",
            show_default=False,
        ),
    ] = None,
    eos_token: Annotated[
        str | None, typer.Option("--eos-token", metavar="TEXT", help="Token to append to each document.", show_default=False)
    ] = None,
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Append the tokenizer's EOS token to each document.")] = False,
    special_tokens: Annotated[
        bool,
        typer.Option(
            "--special-tokens/--no-special-tokens", help="Begin and end each text with the tokens that the tokenizer adds, such as BOS."
        ),
    ] = True,
    split_special_tokens: Annotated[
        bool, typer.Option("--split-special-tokens", help="The text of a special token in a text is ordinary characters.")
    ] = False,
    bad_record_policy: Annotated[
        BadRecordPolicy, typer.Option("--on-bad", help="Invalid records: stop at the first, skip and list them, or only count them.")
    ] = BadRecordPolicy.stop,
    workers: Annotated[
        int, typer.Option("--workers", min=0, max=1024, help="Number of processes; the output does not depend on it. 0: one per CPU.")
    ] = 0,
) -> None:
    """Tokenize text files into token files. If interrupted, the same command resumes."""
    from swarmtrain.launchers.common import trainer_subprocess

    arguments = {"prefix": output_prefix, "tokenizer": tokenizer, "on_bad": bad_record_policy.value, "workers": workers}
    records = {"key": text_key, "prompt_key": prompt_key, "completion_key": completion_key, "chat": chat, "chat_template": chat_template}
    tokens = {
        "eos_token": eos_token,
        "append_eos": append_eos,
        "special_tokens": special_tokens,
        "split_special_tokens": split_special_tokens,
    }
    trainer_subprocess.exec_trainer("data", "tokenize", {**arguments, **records, **tokens}, files)


@app.command("verify")
def verify_token_files(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Prefixes of token files, in any format.")],
    format: Annotated[str, typer.Option("--format", help="As data.format; needed if it cannot be detected.")] = "auto",
    document_token: Annotated[int | None, typer.Option("--document-token", help="As data.document_token.", show_default=False)] = None,
    *,
    json: JsonLinesOption = False,
) -> None:
    """Verify token files end to end: checksums and document boundaries. Prints their contents."""
    from swarmtrain.launchers.common import trainer_subprocess

    trainer_subprocess.exec_trainer("data", "verify", {"format": format, "document_token": document_token, "json": json}, prefixes)


@app.command("inspect")
def inspect_samples(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    sample_count: Annotated[int, typer.Option("--samples", min=1, help="Number of samples, starting with the first.")] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="FILE", help="Tokenizer to decode with, if the files do not name theirs.", show_default=False),
    ] = None,
    *,
    json: JsonLinesOption = False,
) -> None:
    """Show samples as the model sees them: positions, documents, loss mask and text."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.common import trainer_subprocess

    trainer_subprocess.exec_trainer(
        "data",
        "inspect",
        {"config": load_config_file(config_file, overrides).to_json(), "samples": sample_count, "tokenizer": tokenizer, "json": json},
        required_package="torch",
    )
