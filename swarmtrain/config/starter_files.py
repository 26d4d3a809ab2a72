"""The files that `swarmtrain init` writes: a config with the keys that are set first, its JSON schema, and the training script."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmtrain.atomic_file import PUBLIC_MODE, write_files_atomically
from swarmtrain.config import Config
from swarmtrain.config.json_schema import EDITOR_LINE, SCHEMA_FILE_NAME, render_json_schema
from swarmtrain.config.presets import load_preset
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import SwarmtrainError

# In a checkout these are symlinks to the files at its root; in a wheel they are the files themselves.
_SHIPPED_FOLDER = Path(__file__).parent / "shipped"
TRAINING_FILES = ("training_code.py", "datautils.py")
"""The shipped files that a config without a script of the user's own refers to."""
_COMMENT_WIDTH = 110
_HEADER = "# The keys that are usually set first. The others have defaults: swarmtrain init --full writes them all.\n"
_RUNNER = """\
runner:
  runner_type: local            # this machine, without Docker; or swarm, docker, ssh, ssh_docker, slurm
  nodes: 1                      # number of machines; over SSH, list them in hosts
  max_nodes: 4                  # maximum for swarmtrain scale --nodes 4
"""
_TRAINING_SCRIPT = """\
  script: training_code.py      # torchrun starts it once per slot: per GPU, or once per node without GPUs
  code: [datautils.py]          # copied next to the script with each deploy
"""
_CUSTOM_SCRIPT = """\
  script: {script:<21} # torchrun starts it once per slot: per GPU, or once per node without GPUs
  script_args: []               # arguments of the script
  code: []                      # files that the script imports; copied next to it with each deploy
  env: {{}}                       # environment variables of every rank
"""
_CONTAINERS = """\
  docker_config:                # the containers of runner_type swarm, docker and ssh_docker
    docker_container: registry.lab:5000/swarmtrain:latest  # built by: swarmtrain image build --tag IMAGE --push
    docker_mounts: [[/mnt/shared, /workspace/runs]]        # a folder of the hosts, and its path in the container
"""
_CHECKPOINTS = """\
trainer:
  save_dir: {save_dir:<19} # checkpoints of scripts that call swarmtrain.trainer.run()
"""
_TRAINING = """\
topology:
  global_batch_size: 12         # samples per optimizer step, on any number of nodes
  micro_batch_size: 2           # samples per forward pass
learning_rate_scheduler: {{learning_rate: 3.0e-3, learning_rate_warmup_steps: 20}}
trainer:
  train_iterations: 500         # optimizer steps
  save_dir: {save_dir:<19} # checkpoints; deploying again resumes from the newest one
  save_interval: 100
  eval_interval: 250
"""
_SMALL_MODEL = """\
transformer_architecture:
  vocab_size: 256               # one token per byte
  hidden_size: 128
  num_layers: 2
  num_attention_heads: 4
  sequence_length: 128
  precision: float32            # bfloat16 on GPUs
data:                           # written by training_code.py, from the source code of Python's standard library
  data_prefixes: [data/stdlib-train]
  validation_data_prefixes: [data/stdlib-validation]
script: {dataset: python_sources}
"""
_OWN_DATA = """\
data:                           # written by: swarmtrain data tokenize FILE --to data/train --tokenizer tokenizer.json
  data_prefixes: [data/train]
  validation_data_prefixes: [data/validation]
"""


def render_starter_config(name: str, *, script: Path | None = None, preset: str | None = None) -> str:
    """Return a short YAML config for the run `name`: for training_code.py, or for the user's `script`.

    `preset`: name of a well-known model to train with training_code.py. Raises SwarmtrainError if it is unknown.
    """
    save_dir = _format_value(f"runs/{name}")
    if script is not None:
        custom_script = _CUSTOM_SCRIPT.format(script=_format_value(str(script)))
        return "".join([_HEADER, _RUNNER, custom_script, _CONTAINERS, _CHECKPOINTS.format(save_dir=save_dir)])
    model_and_data = _SMALL_MODEL if preset is None else _render_preset(preset) + _OWN_DATA
    return "".join([_HEADER, _RUNNER, _TRAINING_SCRIPT, _CONTAINERS, _TRAINING.format(save_dir=save_dir), model_and_data])


def render_template(preset: str | None = None) -> str:
    """Return a valid YAML config with all defaults written out and a description above each field.

    `preset`: name of the well-known model whose architecture is used for transformer_architecture. Raises SwarmtrainError if it is unknown.
    """
    if preset is None:
        return "# A swarmtrain config. Every line shows its default: delete what you do not change.\n" + _render_section(Config(), "")
    config = Config(transformer_architecture=load_preset(preset))
    head = f"# A swarmtrain config with the architecture of {preset}. All other lines show their defaults: delete what you do not change.\n"
    return head + _render_section(config, "")


def write_starter_files(
    config_file: Path, *, script: Path | None = None, preset: str | None = None, full: bool = False, force: bool = False
) -> list[Path]:
    """Write `config_file`, the schema next to it, and, for a config without `script`, the training script into the working folder.

    Return the written files. `full`: write all keys with their defaults. An existing config is overwritten only with `force`, an
    existing training script never. Raises SwarmtrainError if a file exists or cannot be written, if `script` does not exist, or if
    `preset` is unknown.
    """
    if script is not None and not script.is_file():
        raise SwarmtrainError("no such file", place=f"--script {script}", hint="pass the path of your training script")
    text = render_template(preset) if full else render_starter_config(config_file.stem, script=script, preset=preset)
    files = {config_file: EDITOR_LINE + text, config_file.with_name(SCHEMA_FILE_NAME): render_json_schema()}
    try:
        if config_file.exists() and not force:
            raise SwarmtrainError("exists already", place=str(config_file), hint="use --force to overwrite it")
        write_files_atomically({path: (content.encode(), PUBLIC_MODE) for path, content in files.items()})
    except OSError as error:
        raise SwarmtrainError(
            f"cannot be written: {describe_os_error(error)}", place=str(config_file), hint="choose another file"
        ) from None
    return [*files, *(write_shipped_files(TRAINING_FILES) if script is None else ())]


def write_shipped_files(names: Sequence[str]) -> list[Path]:
    """Write those of the shipped files `names` that the working folder lacks, and return their paths. Raises SwarmtrainError."""
    missing = [Path(name) for name in names if not Path(name).exists()]
    try:
        write_files_atomically({path: ((_SHIPPED_FOLDER / path).read_bytes(), PUBLIC_MODE) for path in missing})
    except OSError as error:
        raise SwarmtrainError(
            f"cannot be written to: {describe_os_error(error)}", place=str(Path.cwd()), hint="use another folder"
        ) from None
    return missing


def _render_section(section: BaseModel, indent: str) -> str:
    return "".join(_render_field(name, info, getattr(section, name), indent) for name, info in type(section).model_fields.items())


def _render_field(name: str, info: FieldInfo, value: Any, indent: str) -> str:
    comment = textwrap.fill(info.description or "", _COMMENT_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    gap = "" if indent else "\n"
    if isinstance(value, BaseModel):
        return f"{gap}{comment}\n{indent}{name}:\n{_render_section(value, indent + '  ')}"
    return f"{gap}{comment}\n{indent}{name}: {_format_value(json.loads(json.dumps(value, default=str)))}\n"


def _render_preset(preset: str) -> str:
    architecture = load_preset(preset).model_dump(mode="json", exclude_defaults=True)
    lines = [f"  {key}: {_format_value(value)}\n" for key, value in architecture.items()]
    return f"transformer_architecture:       # {preset}\n" + "".join(lines)


def _format_value(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
