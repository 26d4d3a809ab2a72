"""`runner.slurm`: what only Slurm has. Names and values are those of sbatch, which checks them itself."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from swarmtrain.config import names
from swarmtrain.config.base import Section

_LEAD_LIMIT = 65535  # sbatch's own


def _options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if not option.startswith("-"):
            raise ValueError(f"{option!r} is no option of sbatch: write it as --name=value")
    return tuple(_line(option) for option in options)


def _line(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError(f"{text!r} must be one line of printable characters")
    return text


def _word(text: str) -> str:
    if " " in _line(text):
        raise ValueError(f"{text!r} has a space in it")
    return text


Word = Annotated[str, AfterValidator(_word)]
Line = Annotated[str, AfterValidator(_line)]


class ApptainerConfig(Section):
    """The container that each node's processes run in, by apptainer or its older self, singularity."""

    image: Word | None = Field(None, description="File (run.sif), folder or docker://IMAGE. null: no container, the Python that deploys.")
    program: Word = Field("apptainer", description="apptainer or singularity, or its path.")
    binds: tuple[Word, ...] = Field((), description="Folders of the node to show, as SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro.")
    nv: bool = Field(False, description="--nv: NVIDIA's GPUs and driver.")
    home: Word | None = Field(None, description="--home: the home folder inside, as SOURCE or SOURCE:TARGET. null: the user's own.")
    env: Annotated[dict[str, str], AfterValidator(names.variables)] = Field({}, description="Variables inside the container alone.")
    python: Word = Field("python", description="Python inside the container; it must have swarmtrain and torch.")


class SlurmConfig(Section):
    """What only Slurm has. null leaves a value to Slurm."""

    account: Word | None = Field(None, description="--account")
    partition: Word | None = Field(None, description="--partition")
    qos: Word | None = Field(None, description="--qos")
    time: Word | None = Field(
        None, description="--time of one job, as 1-12:00:00. A run that needs longer saves, is queued again, and goes on by itself."
    )
    gres: Word | None = Field(None, description="--gres of each node, as gpu:a100:4, and as many slots.")
    gpus_per_node: int | None = Field(None, ge=1, le=names.MOST_SLOTS, description="--gpus-per-node, and as many slots.")
    cpus_per_node: int | None = Field(None, ge=1, le=65536, description="CPUs of each node (--cpus-per-task of its only task).")
    memory: Word | None = Field(None, description="--mem of each node, as 64G; 0 is all.")
    constraint: Word | None = Field(None, description="--constraint")
    exclude: Word | None = Field(None, description="--exclude, as n[01-03,7].")
    log_dir: Word | None = Field(None, description="Folder for what Slurm itself says, in JOB.out. null: the run's own folder.")
    requeue: bool = Field(True, description="Queue the job again when it is preempted, loses a node it needs, or comes to its time limit.")
    signal_seconds: int = Field(
        180, ge=1, le=_LEAD_LIMIT, description="Seconds before the time limit at which ranks save and leave. Slurm may be a minute early."
    )
    options: Annotated[tuple[str, ...], AfterValidator(_options)] = Field((), description="More options of sbatch, as --reservation=mine.")
    prelude: tuple[Line, ...] = Field((), description="Shell lines before anything starts, such as module load cuda.")
    apptainer: ApptainerConfig = Field(ApptainerConfig(), description="The container, if any.")

    @property
    def gpus(self) -> int:
        """GPUs that each node is given, by gpus_per_node or gres; 0 if neither says."""
        match = re.search(r"\bgpu(?::[^:,()]+)?:(\d+)", self.gres or "")
        return self.gpus_per_node or (int(match[1]) if match else 0)
