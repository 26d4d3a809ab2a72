"""`runner.slurm`: settings of the Slurm launcher. Names and values are those of sbatch, which validates the values."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from swarmtrain.config.schema.fields import validators
from swarmtrain.config.schema.fields.host_entry import MAX_SLOTS
from swarmtrain.config.schema.section import Section

_MAX_SIGNAL_SECONDS = 65535  # the limit of sbatch


def _check_sbatch_options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if not option.startswith("-"):
            raise ValueError(f"{option!r} is not an sbatch option: write it as --name=value")
    return tuple(_check_printable_line(option) for option in options)


def _check_printable_line(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError(f"{text!r} must be one line of printable characters")
    return text


def _check_printable_word(text: str) -> str:
    if " " in _check_printable_line(text):
        raise ValueError(f"{text!r} must not contain a space")
    return text


SingleWord = Annotated[str, AfterValidator(_check_printable_word)]
SingleLine = Annotated[str, AfterValidator(_check_printable_line)]


class ApptainerConfig(Section):
    """Settings of the container in which the processes of each node run, under Apptainer or its predecessor Singularity."""

    image: SingleWord | None = Field(
        None, description="Image file (run.sif), folder or docker://IMAGE. null: no container; ranks use the Python that runs deploy."
    )
    program: SingleWord = Field("apptainer", description="apptainer or singularity, or its path.")
    binds: tuple[SingleWord, ...] = Field(
        (), description="Folders of the node to bind-mount, as SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro."
    )
    nv: bool = Field(False, description="Pass --nv: NVIDIA GPUs and driver in the container.")
    home: SingleWord | None = Field(
        None, description="--home: home folder in the container, as SOURCE or SOURCE:TARGET. null: the user's home."
    )
    env: Annotated[dict[str, str], AfterValidator(validators.check_environment)] = Field(
        {}, description="Environment variables set inside the container only."
    )
    python: SingleWord = Field("python", description="Python interpreter inside the container. It needs swarmtrain and torch.")


class SlurmConfig(Section):
    """Settings of the Slurm launcher. null leaves a setting to Slurm's default."""

    account: SingleWord | None = Field(None, description="sbatch --account: account that the job is charged to.")
    partition: SingleWord | None = Field(None, description="sbatch --partition: partition that the job is queued in.")
    qos: SingleWord | None = Field(None, description="sbatch --qos: quality of service.")
    time: SingleWord | None = Field(
        None,
        description="sbatch --time: time limit of one job, as 1-12:00:00. A longer run saves a checkpoint, is requeued "
        "and resumes automatically.",
    )
    gres: SingleWord | None = Field(None, description="sbatch --gres per node, as gpu:a100:4. Its GPU count is also the number of slots.")
    gpus_per_node: int | None = Field(None, ge=1, le=MAX_SLOTS, description="sbatch --gpus-per-node. Also the number of slots.")
    cpus_per_node: int | None = Field(None, ge=1, le=65536, description="CPUs per node (sbatch --cpus-per-task of the node's only task).")
    memory: SingleWord | None = Field(None, description="sbatch --mem: memory per node, as 64G. 0: all.")
    constraint: SingleWord | None = Field(None, description="sbatch --constraint: required node features.")
    exclude: SingleWord | None = Field(None, description="sbatch --exclude: nodes not to use, as n[01-03,7].")
    log_dir: SingleWord | None = Field(None, description="Folder for Slurm's own output, in JOB.out. null: the run's folder.")
    requeue: bool = Field(True, description="Requeue the job when it is preempted, loses a node it needs, or reaches its time limit.")
    signal_seconds: int = Field(
        180,
        ge=1,
        le=_MAX_SIGNAL_SECONDS,
        description="Seconds before the time limit at which ranks save a checkpoint and exit. Slurm may send its signal "
        "up to a minute early.",
    )
    options: Annotated[tuple[str, ...], AfterValidator(_check_sbatch_options)] = Field(
        (), description="Additional sbatch options, as --reservation=mine."
    )
    prelude: tuple[SingleLine, ...] = Field((), description="Shell lines that run before anything else, such as module load cuda.")
    apptainer: ApptainerConfig = Field(ApptainerConfig(), description="Apptainer container of each node's processes.")

    @property
    def requested_gpus_per_node(self) -> int:
        """Number of GPUs requested per node by gpus_per_node or gres; 0 if neither is set."""
        match = re.search(r"\bgpu(?::[^:,()]+)?:(\d+)", self.gres or "")
        return self.gpus_per_node or (int(match[1]) if match else 0)
