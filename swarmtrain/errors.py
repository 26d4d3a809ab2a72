"""Every error that swarmtrain raises on purpose, in one tree.

    SwarmtrainError             what a user is told: a message, a place, a hint; exit code 1
    ├── ConfigError             the YAML file or an override is wrong; carries every problem at once
    ├── PlanError               the config is fine, but these nodes cannot hold it
    ├── ProcessError            a program we started failed; carries its command and its output
    ├── EngineError             a Docker engine cannot be reached, or refused a request
    ├── HostError               a host cannot be reached over SSH, or could not do what it was asked
    ├── ImageError              an image cannot be built, pushed, or found in its registry
    ├── StackError              a stack cannot be brought up or taken down
    ├── RunNotFound             no such run, or several and none was named
    ├── StateError              the folder of the runs on this machine cannot be read or written
    ├── LabError                this machine cannot host the lab, or a part of it failed
    ├── BoardError              the notice board cannot be reached or answered nonsense
    ├── TrainingError           the trainer cannot go on (data, model, or world do not fit)
    │   ├── DataError           the data hold what the model has no place for
    │   ├── WorldError          this world cannot go on, another may: it is cut off, or its ranks do not make whole replicas
    │   └── CheckpointError     a checkpoint is torn, or cannot be written
    │       └── ForeignCheckpoint   it belongs to another model, or to other data
    └── JobFailed               the job itself failed; exit code 3

A traceback that reaches the user is a bug. The command line prints `error: PLACE: MESSAGE` and `hint: HINT`.
Standard library only: the entrypoint imports this inside images in which everything else may be broken.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 3
EXIT_INTERRUPTED = 130


def escape_controls(text: str) -> str:
    """Return `text` with control characters written out, as \\x1b: a file's content or name must not command a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text)


class SwarmtrainError(Exception):
    """Base of all deliberate errors.

    `message` says what is wrong and why, `place` where (`config topology.micro_batch_size`, `node gpu-2`),
    `hint` the next step, preferably a command that can be pasted.
    """

    exit_code = EXIT_ERROR
    lasting: bool | None = None
    """What becomes of a job in which this is raised. True: starting it again is of no use. False: that may help.
    None: it is of no use while the run has not made a step, for then nothing has ever worked."""
    rank: int | None = None
    """The rank that it befell, where all ranks raise what one of them met."""

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message

    @property
    def told(self) -> tuple[tuple[str, str | None], ...]:
        """What is to be told, each with its hint."""
        return ((escape_controls(str(self)), escape_controls(self.hint) if self.hint else None),)

    @property
    def text(self) -> str:
        """The error as it is printed where nobody cares for colours."""
        return "".join(f"error: {text}\n" + (f"hint: {hint}\n" if hint else "") for text, hint in self.told)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: dotted key path, reason, line in the file (1-based) and next step."""

    path: str
    message: str
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"config {self.path}" if self.path else "config"
        if self.line is not None:
            where += f" (line {self.line})"
        return f"{where}: {self.message}"


class ConfigError(SwarmtrainError):
    """The config is wrong. All problems are reported together, in file order."""

    lasting = True

    def __init__(self, problems: tuple[Problem, ...], *, source: str | None = None) -> None:
        self.problems = problems
        self.source = source
        super().__init__("\n".join(str(problem) for problem in problems), place=None)

    @property
    def told(self) -> tuple[tuple[str, str | None], ...]:
        return tuple((f"{self.source}: {problem}" if self.source else str(problem), problem.hint) for problem in self.problems)


class PlanError(SwarmtrainError):
    """The nodes that the cluster has cannot run what the config asks for."""


class ProcessError(SwarmtrainError):
    """A program that we started exited with an error. The message holds its paste-able command and its output."""

    def __init__(self, command: str, returncode: int, output: str, *, hint: str | None = None) -> None:
        self.command = command
        self.returncode = returncode
        self.output = output
        tail = output.strip()
        super().__init__(f"exit code {returncode} from:\n  {command}" + (f"\n{tail}" if tail else ""), hint=hint)


class EngineError(SwarmtrainError):
    """A Docker engine cannot be reached, or refused what it was asked; `status` is then its HTTP status."""

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, place=place, hint=hint)
        self.status = status


class HostError(SwarmtrainError):
    """A host cannot be reached over SSH, or could not do what it was asked."""


class ImageError(SwarmtrainError):
    """An image cannot be built, pushed, pulled, or resolved to a digest."""


class StackError(SwarmtrainError):
    """A stack cannot be brought up, changed, or taken down."""


class RunNotFound(SwarmtrainError):
    """The named run does not exist, or none was named and there is not exactly one."""


class StateError(SwarmtrainError):
    """The folder in which the runs of this machine are kept cannot be read or written."""


class LabError(SwarmtrainError):
    """This machine cannot host a lab, or a part of the lab failed."""


class BoardError(SwarmtrainError):
    """The notice board cannot be reached in time, or its answer makes no sense."""


class TrainingError(SwarmtrainError):
    """The trainer cannot go on: data, model and world do not fit together."""


class DataError(TrainingError):
    """The data hold what the model has no place for: tokens outside its vocabulary."""

    lasting = True


class WorldError(TrainingError):
    """This world cannot go on, another may: it is cut off by a newer one, or its ranks do not make whole replicas."""

    lasting = False


class CheckpointError(TrainingError):
    """A checkpoint is torn, or cannot be written."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint belongs to another model, or was trained on other data."""

    lasting = True


class JobFailed(SwarmtrainError):
    """The job itself failed; `code` is its own exit code."""

    exit_code = EXIT_JOB_FAILED

    def __init__(self, message: str, *, code: int, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, place=place, hint=hint)
        self.code = code
