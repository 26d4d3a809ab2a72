"""export, sample, embed, evaluate: what a run has made, for other programs and for use."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFile, Json, Overrides


class Dtype(StrEnum):
    """Numbers that a model's files can hold."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Base = Annotated[
    Path | None,
    typer.Option(
        "--base", metavar="FOLDER", help="Where the model is that was tuned, if not where trainer.init_from says.", show_default=False
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A run's save_dir: its newest checkpoint. A checkpoint. A folder as Hugging Face has it.", show_default=False
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, or bytes. Without it: the model's own.", show_default=False),
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes that share the work.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(export)
    app.command()(sample)
    app.command()(embed)
    app.command()(evaluate)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or the save_dir of a run: its newest.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write. It must not be there.", show_default=False)],
    *,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Its numbers. Without it: as they are.", show_default=False)] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Most that one of its files has.")] = "5GiB",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Its tokenizer.json, to lie beside it.", show_default=False)
    ] = None,
    base: Base = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only what LoRA has learned, as PEFT has it. Without it: merged.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint as a folder that Hugging Face's transformers load: config.json and safetensors."""
    from swarmtrain.launchers import verbs
    from swarmtrain.view import memory

    question = {
        "source": str(source),
        "base": None if base is None else str(base),
        "output": str(output),
        "dtype": dtype,
        "shard_bytes": memory.size(shard_size, "--shard-size"),
        "adapter": adapter,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "json": json,
    }
    raise typer.Exit(verbs.share("export", question))


def sample(
    source: Model,
    *,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="What to go on from. Repeatable; else standard input.", show_default=False),
    ] = [],  # noqa: B006  # typer's way
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="More of them, one a line.", show_default=False, readable=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens at most, for each.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Above 1 more surprising, below less; 0: always the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Of so many of the likeliest tokens. 0: of all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Of the likeliest tokens that have this much of the probability.")
    ] = 1.0,
    stop: Annotated[list[str], typer.Option("--stop", metavar="TEXT", help="End before this. Repeatable.", show_default=False)] = [],  # noqa: B006  # typer's way
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="The same number, the same text.", show_default=False),
    ] = None,
    tokenizer: Tokenizer = None,
    base: Base = None,
    ranks: Ranks = 1,
    json: Json = False,
) -> None:
    """Let a model go on from a text: one prompt as it comes, several at once."""
    from swarmtrain.cli.prompts import read
    from swarmtrain.launchers import verbs

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop, "seed": seed, "tokenizer": tokenizer}
    model = {"source": str(source), "base": None if base is None else str(base)}
    question = {**model, "prompts": read(prompt, prompts), "most": max_tokens, **options, "json": json}
    raise typer.Exit(verbs.share("sample", question, ranks))


def embed(
    source: Model,
    *,
    text: Annotated[
        list[str], typer.Option("--text", metavar="TEXT", help="A text. Repeatable; else standard input.", show_default=False)
    ] = [],  # noqa: B006  # typer's way
    texts: Annotated[
        Path | None, typer.Option("--texts", metavar="FILE", help="More of them, one a line.", show_default=False, readable=False)
    ] = None,
    instruction: Annotated[
        str,
        typer.Option(
            "--instruction",
            metavar="TEXT",
            help="Read before each text, without being a part of what the vector is of.",
            show_default=False,
        ),
    ] = "",
    append_eos: Annotated[
        bool | None,
        typer.Option(
            "--append-eos/--no-append-eos",
            help="End each text with the tokenizer's token for that. Without it: as its data were.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="A .npy, of float32: a row for each text. Without it: JSON, a line for each.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts at a time.")] = 32,
    tokenizer: Tokenizer = None,
    base: Base = None,
    ranks: Ranks = 1,
) -> None:
    """Make vectors of texts, by a model that was trained to: a cosine tells how near two of them are."""
    from swarmtrain.cli.prompts import read_texts
    from swarmtrain.launchers import verbs

    model = {"source": str(source), "base": None if base is None else str(base), "tokenizer": tokenizer}
    options = {"instruction": instruction, "append_eos": append_eos, "batch": batch, "output": None if output is None else str(output)}
    raise typer.Exit(verbs.share("embed", {**model, "texts": read_texts(text, texts), **options}, ranks))


def evaluate(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="MODEL", help="As for sample. Without it: the newest checkpoint in trainer.save_dir.", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks", metavar="NAME,…", help="Tasks of lm-evaluation-harness, instead of held-out data. Repeatable.", show_default=False
        ),
    ] = [],  # noqa: B006  # typer's way
    shots: Annotated[
        int | None, typer.Option("--shots", min=0, help="Examples before each question. Without it: as the task says.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Questions of each task. Without it: all.", show_default=False)
    ] = None,
    task_files: Annotated[
        Path | None, typer.Option("--task-files", metavar="FOLDER", help="Tasks of your own.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at a time, under tasks.")] = 8,
    tokenizer: Tokenizer = None,
    ranks: Ranks = 1,
    json: Json = False,
) -> None:
    """Tell the held-out loss of a model, as training tells it: over trainer.eval_iterations batches of the config's held-out data."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import verbs

    config = load(config_file, override)
    question = {
        "config": config.to_json(),
        "model": None if model is None else str(model),
        "tasks": [name for each in tasks for name in each.split(",") if name],
        "shots": shots,
        "limit": limit,
        "task_files": None if task_files is None else str(task_files),
        "batch": batch,
        "tokenizer": tokenizer,
        "json": json,
    }
    raise typer.Exit(verbs.share("evaluate", question, ranks))
