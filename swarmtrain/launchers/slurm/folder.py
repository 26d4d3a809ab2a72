"""The folder of one Slurm run, on the home that all nodes share: `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected).

slurm.json          that there is a run: its job, its files; removed by `down`
files-DIGEST/       what a job was submitted with: job.sh, deployed.json, config.json, code/, secrets/
NODE.state          how a node stands, by its own keeper        logs/       the ranks' own files
events.jsonl        the notice board's lines                    NODE.log    what a node printed, each line with its time
slurm.out           what Slurm and the batch script say         lock        held by whoever changes the run
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.files import OPEN, SECRET, write_all
from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.host.spec import replace
from swarmtrain.launchers.kept import state_directory
from swarmtrain.launchers.local.folder import RunFolder
from swarmtrain.launchers.slurm import job
from swarmtrain.plan import Cargo, CodeFile, Plan
from swarmtrain.wire import RENDEZVOUS, VERDICT, Event

_MARK = "slurm.json"
_FACTS = "facts.json"
_ASK_EVERY = 2.0
SCRIPT = "job.sh"


@dataclass(frozen=True)
class Attempt:
    """One time that a job ran: Slurm keeps a job's number when it queues it again."""

    job: str
    step: str
    restarts: int


@dataclass(frozen=True)
class NodeState:
    """How a node stood when it last said so, in Swarm's words: running, complete, failed (and about to be started again), shutdown."""

    host: str
    state: str
    attempt: Attempt
    exit_code: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class Facts:
    """What a later process must know of the run."""

    files: str
    """Name of the folder of its files."""
    code: tuple[str, ...]
    secrets: tuple[str, ...]
    nodes: int
    stop_grace: float
    cwd: str
    job: str = ""
    """The job's number; empty until Slurm has given it one."""
    allocation: bool = False
    """The job is the user's own (salloc), and the run but a step of it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> Facts | None:
        """Read them back, None if there are none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(**{**data, "code": tuple(data["code"]), "secrets": tuple(data["secrets"])})


def at_work(facts: Facts, run: str) -> bool:
    """Whether the run's job waits or runs. Raises EngineError."""
    if not facts.job:
        return False
    return bool(job.steps(facts.job, run)) if facts.allocation else job.state(facts.job).there


class JobFolder(RunFolder):
    """One run's folder."""

    def __init__(self, run: str, path: Path | None = None) -> None:
        super().__init__(run)
        self.path = path or self.path
        self._asked, self._at_work = float("-inf"), True

    @property
    def exists(self) -> bool:
        return (self.path / _MARK).exists()

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def names(self) -> list[str]:
        facts = self.facts_or_none()
        return [*(f"node{index}" for index in range(facts.nodes)), RENDEZVOUS] if facts else []

    def alive(self, name: str) -> bool:
        """Whether the run's job is in Slurm's queue, as asked every other second."""
        if time.monotonic() > self._asked + _ASK_EVERY:
            facts, self._asked = self.facts_or_none(), time.monotonic()
            with contextlib.suppress(EngineError):  # what does not answer now may answer later
                self._at_work = facts is not None and at_work(facts, self.run)
        return self._at_work

    def facts_or_none(self) -> Facts | None:
        """Return what is known of the run, None if it is not there."""
        return Facts.load(self.path / _MARK)

    def job_facts(self) -> Facts:
        """Raises RunNotFound."""
        if (found := self.facts_or_none()) is None:
            known = ", ".join(slurm_runs()) or "none"
            raise RunNotFound(f"there is no run of this name under Slurm; there is: {known}", place=f"run {self.run}")
        return found

    def write_files(self, plan: Plan, facts: Facts, script: str) -> Path:
        """Write what a job is submitted with, and return the script's path. Raises OSError."""
        files = self.path / facts.files
        (files / "secrets").mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        texts = {"deployed.json": plan.config.to_json(), "config.json": plan.config.resolved().to_json()}
        texts |= {SCRIPT: script, _FACTS: facts.to_json()}
        write_all(
            {files / "secrets" / item.name: (item.content, SECRET) for item in plan.cargo.secrets}
            | {files / "code" / item.name: (item.content, OPEN) for item in plan.cargo.code}
            | {files / each: (text.encode(), OPEN) for each, text in texts.items()}
        )
        return files / SCRIPT

    def note(self, facts: Facts) -> None:
        """Write down that there is a run. Raises OSError."""
        replace(self.path / _MARK, facts.to_json())

    def read(self) -> tuple[Config, Cargo]:
        facts = self.job_facts()
        files = self.path / facts.files
        code = tuple(CodeFile.of(name, (files / "code" / name).read_bytes()) for name in facts.code)
        secrets = tuple(CodeFile.of(name, (files / "secrets" / name).read_bytes()) for name in facts.secrets)
        return Config.from_json((files / "deployed.json").read_text(encoding="utf-8")), Cargo(code, secrets)

    def forget_files(self, *, but: str = "") -> None:
        """Remove what jobs were submitted with, secrets among it, but for that folder."""
        for files in self.path.glob("files-*"):
            if files.name != but:
                shutil.rmtree(files, ignore_errors=True)

    def remove(self) -> None:
        """Remove the run; its events and logs stay. The mark goes last: until then the run can be found, and removed again."""
        self.forget_files()
        for state in self.path.glob("*.state"):
            state.unlink(missing_ok=True)
        (self.path / _MARK).unlink(missing_ok=True)


def slurm_runs() -> list[str]:
    """Return the names of all runs under Slurm, sorted. Raises OSError."""
    try:
        return sorted(path.name for path in state_directory().iterdir() if JobFolder(path.name).exists)
    except FileNotFoundError:
        return []


def adopt(folder: Path, files: str, number: str) -> None:
    """Note that job `number` is the run's, as it is not yet where somebody has submitted the script by hand."""
    found = JobFolder(folder.name, folder)
    facts = found.facts_or_none()
    if (facts is None or facts.job != number) and (own := Facts.load(folder / files / _FACTS)) is not None:
        found.note(changed(own, job=number))


def node_state(folder: Path, name: str) -> NodeState | None:
    """Return how `name` last said that it stands, None if it has not."""
    try:
        data = json.loads((folder / f"{name}.state").read_text(encoding="utf-8"))
        return NodeState(**{**data, "attempt": Attempt(**data["attempt"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def verdict_in(events: Path, *, default: int) -> int:
    """Return the exit code of the verdict that stands last in `events`."""
    with events.open(encoding="utf-8", errors="replace") as lines:
        verdicts = [event for line in lines if (event := Event.from_line(line)) and event.kind == VERDICT]
    return int(verdicts[-1].data.get("exit_code") or 0) if verdicts else default
