"""All errors that swarmtrain raises deliberately, in one hierarchy.

    SwarmtrainError             shown to the user: a message, a place, a hint; exit code 1
    ├── ConfigError             the YAML file or an override is invalid; contains every problem at once
    ├── PlanError               the config is valid, but the nodes cannot run what it requires
    ├── ProcessError            a program that swarmtrain started failed; contains its command and output
    ├── EngineError             a Docker engine cannot be reached, or refused a request
    ├── HostError               a host cannot be reached over SSH, or a request to it failed
    ├── ImageError              an image cannot be built, pushed, pulled, or resolved to a digest
    ├── StackError              a stack cannot be deployed, updated, or removed
    │   ├── NodesRefused        machines refuse to start nodes: an image or a mount is missing there
    │   ├── ResourcesReserved   other runs have reserved GPUs that the run needs
    │   └── ConfirmationRequired    the user must confirm a change, but there is no terminal; exit code 2
    ├── RunNotFound             no such run; or no name was given, and the user has no run
    ├── AmbiguousRun            several runs have this name; or no name was given, and the user has several runs
    ├── StateDirectoryError     the state directory of this machine cannot be read or written
    ├── LabError                this machine cannot host the lab, or a part of it failed
    ├── CoordinatorError        the coordinator cannot be reached, or its response is invalid
    │   └── ProtocolMismatch    the coordinator uses another version of the protocol
    ├── DeliveryError           a notification could not be delivered
    │   └── ChannelGone         no later attempt can succeed
    ├── TrainingError           the trainer cannot continue (e.g. invalid data, model or topology)
    │   ├── DataError           the data contain tokens outside the model's vocabulary
    │   ├── WorldError          this world cannot continue, but another may: it is fenced off, or its ranks do not form complete replicas
    │   └── CheckpointError     a checkpoint is corrupt, or cannot be written
    │       └── IncompatibleCheckpoint   the checkpoint belongs to another model, other data or another format
    └── JobFailed               the job itself failed; exit code 3

A traceback that reaches the user is a bug. The command line prints `error: PLACE: MESSAGE` and `hint: HINT`.
Standard library only: the entrypoint imports this in images whose other packages may be broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 3
EXIT_INTERRUPTED = 130


def escape_control_characters(text: str) -> str:
    """Return `text` with control characters escaped, such as \\x1b: a file's content or name must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text)


class SwarmtrainError(Exception):
    """Base class of all errors that swarmtrain raises deliberately.

    `message` says what is wrong and why, `place` where (`config topology.micro_batch_size`, `node gpu-2`), `hint` the next step, preferably
    a command that can be pasted.
    """

    exit_code = EXIT_ERROR
    is_permanent: bool | None = None
    """Whether the error recurs if the job is restarted. True: it does. False: a restart may succeed.

    None: it is assumed to recur only if the run has not completed a step yet.
    """
    rank: int | None = None
    """Rank on which the error occurred, if all ranks raise it because one failed; None otherwise."""

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message

    @property
    def messages_with_hints(self) -> tuple[tuple[str, str | None], ...]:
        """Messages to show, each with its hint (None: no hint)."""
        return ((escape_control_characters(str(self)), escape_control_characters(self.hint) if self.hint else None),)

    @property
    def plain_text(self) -> str:
        """The error as it is printed, without colors."""
        return "".join(f"error: {text}\n" + (f"hint: {hint}\n" if hint else "") for text, hint in self.messages_with_hints)


@dataclass(frozen=True)
class Problem:
    """One problem of a config: dotted key path, reason, line in the file (1-based) and next step."""

    path: str
    message: str
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        location = f"config {self.path}" if self.path else "config"
        if self.line is not None:
            location += f" (line {self.line})"
        return f"{location}: {self.message}"


class ConfigError(SwarmtrainError):
    """The config is invalid. All problems are reported together, in file order."""

    is_permanent = True

    def __init__(self, problems: tuple[Problem, ...], *, source: str | None = None) -> None:
        self.problems = problems
        self.source = source
        super().__init__("\n".join(str(problem) for problem in problems), place=None)

    @property
    def messages_with_hints(self) -> tuple[tuple[str, str | None], ...]:
        return tuple((f"{self.source}: {problem}" if self.source else str(problem), problem.hint) for problem in self.problems)


class PlanError(SwarmtrainError):
    """The nodes of the cluster cannot run what the config requires. `causes`: errors of single machines, each with its own hint."""

    def __init__(
        self, message: str, *, place: str | None = None, hint: str | None = None, causes: tuple[SwarmtrainError, ...] = ()
    ) -> None:
        super().__init__(message, place=place, hint=hint)
        self.causes = causes

    @property
    def messages_with_hints(self) -> tuple[tuple[str, str | None], ...]:
        return (*super().messages_with_hints, *(item for cause in self.causes for item in cause.messages_with_hints))


class ProcessError(SwarmtrainError):
    """A program that swarmtrain started exited with an error. The message contains its command, ready to paste, and its output."""

    def __init__(self, command: str, returncode: int, output: str, *, hint: str | None = None) -> None:
        self.command = command
        self.returncode = returncode
        self.output = output
        tail = output.strip()
        super().__init__(f"exit code {returncode} from:\n  {command}" + (f"\n{tail}" if tail else ""), hint=hint)


class EngineError(SwarmtrainError):
    """A Docker engine cannot be reached, or refused a request. `status`: HTTP status of the refused request."""

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, place=place, hint=hint)
        self.status = status


class SwarmAbsentError(EngineError):
    """The engine answers, but is not part of a swarm."""


class HostError(SwarmtrainError):
    """A host cannot be reached over SSH, or a request to it failed."""


class ImageError(SwarmtrainError):
    """An image cannot be built, pushed, pulled, or resolved to a digest."""


class StackError(SwarmtrainError):
    """A stack cannot be deployed, updated, or removed."""


class NodesRefused(StackError):
    """Machines refuse to start nodes of a run. `reasons`: reason and hint by host name."""

    def __init__(
        self, message: str, *, place: str | None = None, hint: str | None = None, reasons: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        super().__init__(message, place=place, hint=hint)
        self.reasons = dict(reasons or {})


class ResourcesReserved(StackError):
    """Other runs have reserved GPUs that a run needs. Nothing was changed; a later deploy may succeed."""


class ConfirmationRequired(StackError):
    """The user must confirm a change, but there is no terminal for the question."""

    exit_code = EXIT_USAGE


class RunNotFound(SwarmtrainError):
    """No run with this name exists; or no name was given, and the user has no run."""


class AmbiguousRun(SwarmtrainError):
    """Several runs have this name; or no name was given, and the user has several runs."""


class ComparisonError(SwarmtrainError):
    """The named runs cannot be compared: they are not two different runs with curves."""


class StateDirectoryError(SwarmtrainError):
    """The state directory, which holds the runs on this machine, cannot be read or written."""


class LabError(SwarmtrainError):
    """This machine cannot host a lab, or a part of the lab failed."""


class CoordinatorError(SwarmtrainError):
    """The coordinator cannot be reached in time, or its response is invalid."""


class CoordinatorNameError(CoordinatorError):
    """The host name of the coordinator does not resolve."""


class ProtocolMismatch(CoordinatorError):
    """The coordinator and this process use different versions of the protocol."""


class DeliveryError(SwarmtrainError):
    """Raised if an attempt to deliver a notification failed; a later attempt may succeed.

    Its message contains neither the URL nor the key of the channel, so that it can be logged.
    """


class ChannelGone(DeliveryError):
    """Raised if no later attempt can succeed: the receiver no longer wants notifications, or the program that sends them is missing."""


class TrainingError(SwarmtrainError):
    """The trainer cannot continue, for example because the data, the model or the topology is invalid."""


class DataError(TrainingError):
    """The data contain tokens outside the model's vocabulary."""

    is_permanent = True


class WorldError(TrainingError):
    """This world cannot continue, but another may: a newer world has fenced it off, or its ranks do not form complete replicas."""

    is_permanent = False


class CheckpointError(TrainingError):
    """A checkpoint is corrupt, or cannot be written."""


class IncompatibleCheckpoint(CheckpointError):
    """A checkpoint belongs to another model, other data or another format."""

    is_permanent = True


class JobFailed(SwarmtrainError):
    """The job itself failed; `job_exit_code` is the exit code of the job."""

    exit_code = EXIT_JOB_FAILED

    def __init__(self, message: str, *, job_exit_code: int, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, place=place, hint=hint)
        self.job_exit_code = job_exit_code
