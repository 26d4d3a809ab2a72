"""`swarmtrain data`: token files from text, and what is in them."""

from enum import Enum
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFile, Overrides

app = typer.Typer(no_args_is_help=True)


class OnBad(Enum):
    """What becomes of a record that cannot be read."""

    stop = "stop"
    skip = "skip"
    count = "count"


@app.command()
def prepare(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="JSONL, Parquet, or plain text, a document a file; also as 'globs/**'.")
    ],
    *,
    to: Annotated[str, typer.Option("--to", metavar="PREFIX", help="What to write: PREFIX.bin, PREFIX.idx and PREFIX.meta.json.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json; or bytes, for a token a byte.")],
    key: Annotated[
        str | None,
        typer.Option("--key", help="Where a record of JSONL or Parquet has its text: text, or with --chat messages.", show_default=False),
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option("--prompt-key", help="Where a record has a prompt: it does not count in the loss.", show_default=False)
    ] = None,
    completion_key: Annotated[
        str | None, typer.Option("--completion-key", help="Where it has what follows the prompt, and counts.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Records are conversations: what the assistant says counts in the loss.")] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="FILE",
            help="A tokenizer_config.json or a Jinja template. Without it: the one beside the tokenizer, else ChatML.",
            show_default=False,
        ),
    ] = None,
    end_token: Annotated[
        str | None, typer.Option("--end-token", metavar="TEXT", help="A token to put after each document.", show_default=False)
    ] = None,
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Put the tokenizer's own end of text after each document.")] = False,
    on_bad: Annotated[
        OnBad, typer.Option("--on-bad", help="Records that cannot be read: stop at one, skip and name them, or only count them.")
    ] = OnBad.stop,
    workers: Annotated[
        int, typer.Option("--workers", min=0, max=1024, help="Processes; what is written is the same. 0: one a processor.")
    ] = 0,
) -> None:
    """Write token files from text. Ended at any moment, the same command goes on where it was."""
    from swarmtrain.launchers import verbs

    asked = {"prefix": to, "tokenizer": tokenizer, "on_bad": on_bad.value, "workers": workers}
    records = {"key": key, "prompt_key": prompt_key, "completion_key": completion_key, "chat": chat, "chat_template": chat_template}
    verbs.become("data", "prepare", {**asked, **records, "end_token": end_token, "append_eos": append_eos}, files)


@app.command()
def verify(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Prefixes of token files, of any format.")],
    format: Annotated[str, typer.Option("--format", help="As data.format: what they are, if they do not tell.")] = "auto",
    document_token: Annotated[int | None, typer.Option("--document-token", help="As data.document_token.", show_default=False)] = None,
) -> None:
    """Read token files from end to end: are they as they were written, is every document in its place? Prints what they hold."""
    from swarmtrain.launchers import verbs

    verbs.become("data", "verify", {"format": format, "document_token": document_token}, prefixes)


@app.command()
def inspect(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    samples: Annotated[int, typer.Option("--samples", min=1, help="How many, from the first on.")] = 3,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="FILE", help="What to decode by, if the files do not say.", show_default=False)
    ] = None,
) -> None:
    """Show samples as the model will see them: positions, documents, what counts in the loss, and the text."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import verbs

    verbs.become(
        "data", "inspect", {"config": load(config_file, override).to_json(), "samples": samples, "tokenizer": tokenizer}, needs="torch"
    )
