"""The commands for trained models: export, sample, embed, evaluate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFileArgument, JsonOption, OverridesOption


class ExportDtype(StrEnum):
    """Data types of an exported model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


BaseModelOption = Annotated[
    Path | None,
    typer.Option(
        "--base", metavar="FOLDER", help="Folder of the base model of an adapter, if not at trainer.init_from.", show_default=False
    ),
]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A run's save_dir (its newest checkpoint), a checkpoint, or a Hugging Face model folder.", show_default=False
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="FILE", help="Path of a tokenizer.json, or bytes. Default: the model's own.", show_default=False),
]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Number of processes to divide the work over.")]


def register_commands(app: typer.Typer) -> None:
    """Register the commands of this module on the Typer app `app`."""
    app.command("export")(export_model)
    app.command("sample")(generate_text)
    app.command("embed")(embed_texts)
    app.command("evaluate")(evaluate_model)


def export_model(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's save_dir (its newest checkpoint).", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write. It must not exist.", show_default=False)],
    *,
    dtype: Annotated[
        ExportDtype | None, typer.Option("--dtype", help="Data type of the tensors. Default: unchanged.", show_default=False)
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Maximum size of each file.")] = "5GiB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json or its folder, to copy. Default: the base model's.", show_default=False
        ),
    ] = None,
    base_model: BaseModelOption = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter", help="Export only the LoRA adapter, in PEFT format. Default: merged into the model.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Export a checkpoint to Hugging Face format: a folder with config.json and safetensors."""
    from swarmtrain.cli import model_arguments
    from swarmtrain.launchers.common import trainer_subprocess
    from swarmtrain.view.estimates import memory

    shard_bytes = memory.parse_size(shard_size, "--shard-size")
    model_arguments.check_tokenizer_file(tokenizer)
    model_arguments.check_checkpoint_folder(checkpoint)
    model_arguments.check_base_model_folder(base_model)
    request = {
        "source": str(checkpoint),
        "base": None if base_model is None else str(base_model),
        "output": str(output),
        "dtype": dtype,
        "shard_bytes": shard_bytes,
        "adapter": adapter_only,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "json": json,
    }
    raise typer.Exit(trainer_subprocess.run_trainer_ranks("export", request))


def generate_text(
    model_path: ModelArgument,
    *,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="Prompt. Repeatable. Default: standard input.", show_default=False),
    ] = [],  # noqa: B006  # Typer's convention for lists
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="File with more prompts, one per line.", show_default=False, readable=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum number of generated tokens per prompt.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0.0, help="Sampling temperature. Above 1: more random; below 1: less random; 0: greedy decoding."
        ),
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Sample from the k most likely tokens only. 0: from all tokens.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Nucleus sampling: sample from the most likely tokens with this cumulative probability. 1: from all tokens.",
        ),
    ] = 1.0,
    stop: Annotated[list[str], typer.Option("--stop", metavar="TEXT", help="Stop before this text. Repeatable.", show_default=False)] = [],  # noqa: B006  # Typer's convention for lists
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Random seed: the same seed gives the same text.", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message, in the model's chat template.")] = False,
    tokenizer: TokenizerOption = None,
    base_model: BaseModelOption = None,
    ranks: RanksOption = 1,
    json: JsonOption = False,
) -> None:
    """Generate text from prompts. A single completion is streamed; several are generated as a batch."""
    from swarmtrain.cli import model_arguments
    from swarmtrain.launchers.common import trainer_subprocess

    prompts = model_arguments.read_prompts(prompt, prompt_file)
    model_arguments.check_model_folder(model_path)
    model_arguments.check_base_model_folder(base_model)
    model_arguments.check_tokenizer_file(tokenizer)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop, "seed": seed, "tokenizer": tokenizer}
    model = {"source": str(model_path), "base": None if base_model is None else str(base_model)}
    request = {**model, "prompts": prompts, "max_tokens": max_tokens, **options, "chat": chat, "json": json}
    raise typer.Exit(trainer_subprocess.run_trainer_ranks("sample", request, ranks))


def embed_texts(
    model_path: ModelArgument,
    *,
    text: Annotated[
        list[str], typer.Option("--text", metavar="TEXT", help="Text to embed. Repeatable. Default: standard input.", show_default=False)
    ] = [],  # noqa: B006  # Typer's convention for lists
    text_file: Annotated[
        Path | None, typer.Option("--texts", metavar="FILE", help="File with more texts, one per line.", show_default=False, readable=False)
    ] = None,
    instruction: Annotated[
        str,
        typer.Option(
            "--instruction",
            metavar="TEXT",
            help="Instruction put before each text. Its tokens are excluded from pooling.",
            show_default=False,
        ),
    ] = "",
    append_eos: Annotated[
        bool | None,
        typer.Option(
            "--append-eos/--no-append-eos",
            help="Append the tokenizer's EOS token to each text. Default: as in the model's training data.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write a .npy file of float32, one row per text. Default: print JSON, one line per text.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch", min=1, help="Batch size, in texts.")] = 32,
    tokenizer: TokenizerOption = None,
    base_model: BaseModelOption = None,
    ranks: RanksOption = 1,
) -> None:
    """Compute text embeddings with a model trained for it. Similar texts have embeddings with a high cosine similarity."""
    from swarmtrain.cli import model_arguments
    from swarmtrain.launchers.common import trainer_subprocess

    texts = model_arguments.read_texts(text, text_file)
    model_arguments.check_model_folder(model_path)
    model_arguments.check_base_model_folder(base_model)
    model_arguments.check_tokenizer_file(tokenizer)
    model_arguments.check_output_file(output)
    model = {"source": str(model_path), "base": None if base_model is None else str(base_model), "tokenizer": tokenizer}
    options = {
        "instruction": instruction,
        "append_eos": append_eos,
        "batch_size": batch_size,
        "output": None if output is None else str(output),
    }
    raise typer.Exit(trainer_subprocess.run_trainer_ranks("embed", {**model, "texts": texts, **options}, ranks))


def evaluate_model(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    *,
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="MODEL", help="Model, as for sample. Default: the newest checkpoint in trainer.save_dir.", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks",
            metavar="NAME,…",
            help="Tasks of lm-evaluation-harness to run instead of the validation loss. Repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # Typer's convention for lists
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", min=0, help="Number of few-shot examples. Default: as the task defines.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of questions per task. Default: all.", show_default=False)
    ] = None,
    task_files: Annotated[
        Path | None, typer.Option("--task-files", metavar="FOLDER", help="Folder with custom tasks.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch", min=1, help="Batch size of tasks, in sequences.")] = 8,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Questions of tasks are conversations, in the model's chat template.")
    ] = False,
    tokenizer: TokenizerOption = None,
    ranks: RanksOption = 1,
    json: JsonOption = False,
) -> None:
    """Evaluate a model: validation loss over trainer.eval_iterations batches, as in training, or lm-evaluation-harness tasks."""
    from swarmtrain.cli import model_arguments
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.common import trainer_subprocess

    config = load_config_file(config_file, overrides)
    if folder := model_path or config.trainer.save_dir:
        model_arguments.check_model_folder(folder)
    model_arguments.check_tokenizer_file(tokenizer)
    request = {
        "config": config.to_json(),
        "model": None if model_path is None else str(model_path),
        "tasks": [name for each in tasks for name in each.split(",") if name],
        "num_fewshot": num_fewshot,
        "limit": limit,
        "task_files": None if task_files is None else str(task_files),
        "batch_size": batch_size,
        "apply_chat_template": apply_chat_template,
        "tokenizer": tokenizer,
        "json": json,
    }
    raise typer.Exit(trainer_subprocess.run_trainer_ranks("evaluate", request, ranks))
