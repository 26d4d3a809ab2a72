"""The Slurm launcher: a run is one job, and on each of its nodes a supervisor as under Swarm.

`up` writes one script and submits it (swarmtrain.render.slurm says what it does). The run's folder is on the home that
login nodes and compute nodes share; any later process of the same user finds the run by it. Inside an allocation of the
user's own the same script is started beside him, and its srun takes the allocation's nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

from swarmtrain.config import Config
from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import Act, Finding, LogLine, Say, TaskState, Update
from swarmtrain.launchers.local import follow as files
from swarmtrain.launchers.local.folder import in_state
from swarmtrain.launchers.slurm import job
from swarmtrain.launchers.slurm.folder import SCRIPT, Facts, JobFolder, at_work, node_state, slurm_runs
from swarmtrain.plan import Cargo, Inventory, Machine, Plan
from swarmtrain.render.slurm import LEAVE, Site, files_in, script
from swarmtrain.wire import VERDICT, Event

_MOST_NODES = 10_000
_POLL = 0.1
_ASK_EVERY = 2.0
_TRAIL = 5.0  # seconds after the verdict in which nodes may still print their last lines
_GOODBYE = 30.0  # for Slurm to clean up after a job
_LAST_WORDS = 10


class SlurmLauncher:
    """Runs under Slurm. Implements swarmtrain.launchers.base.Launcher."""

    @property
    def where(self) -> str:
        """The cluster that this machine's Slurm commands speak to."""
        return "Slurm"

    def inventory(self) -> Inventory:
        """Return as many machines as anybody may want: which they are, Slurm decides when the job starts."""
        return Inventory("Slurm", tuple(Machine(host="any") for _ in range(_MOST_NODES)))

    @in_state()
    def check(self, plan: Plan) -> list[Finding]:
        """Ask Slurm itself whether it would take the job."""
        if allocated := job.allocation():
            there = int(os.environ.get("SLURM_JOB_NUM_NODES", _MOST_NODES))
            few = Finding(f"allocation {allocated}", f"has {there} nodes, and {len(plan.nodes)} are wanted", "-o runner.nodes=N")
            return [few] if there < len(plan.nodes) else []
        folder = JobFolder(plan.run)
        try:
            job.check(script(plan, _site(folder, _facts(plan, folder, None))))
        except EngineError as error:
            return [Finding("Slurm", error.message, error.hint)]
        return []

    @in_state()
    def changes(self, plan: Plan) -> list[Act]:
        """Return what `up` would do."""
        folder = JobFolder(plan.run)
        before = folder.facts_or_none()
        if before is None or not at_work(before, plan.run):
            return [Act("submit", "a job", "is not there" if before is None else f"job {before.job} has ended")]
        if _same(folder, plan, before):
            return []
        running = before.allocation or job.state(before.job).runs
        return [
            Act("end", f"job {before.job}", "it differs from the plan; its ranks save and leave", running),
            Act("submit", "a job", "that goes on from there"),
        ]

    @in_state()
    def up(self, plan: Plan, say: Say) -> None:
        """Submit the job; one that is there and differs saves and leaves before. Raises SwarmtrainError."""
        folder = JobFolder(plan.run)
        with folder.locked(say):
            before = folder.facts_or_none()
            live = before is not None and at_work(before, plan.run)
            if live and before and _same(folder, plan, before):
                return
            facts = _facts(plan, folder, before if live else None)
            if live and before:
                say(f"job {before.job}: its ranks save and leave")
                _end(before, plan.run)
            try:
                self._submit(folder, plan, facts, say, goes_on=before is not None)
            except BaseException:
                if before is None:
                    folder.remove()
                raise

    def _submit(self, folder: JobFolder, plan: Plan, facts: Facts, say: Say, *, goes_on: bool) -> None:
        path = folder.write_files(plan, facts, script(plan, _site(folder, facts)))
        if not goes_on or any(event.kind == VERDICT for event in files.events(folder)):
            folder.put_old_events_aside()
        for state in folder.path.glob("*.state"):
            state.unlink(missing_ok=True)
        if allocated := job.allocation():
            folder.note(replace(facts, job=allocated, allocation=True))
            job.step_in_allocation(path, folder.path / "slurm.out")
            _await_step(allocated, plan.run, folder)
            say(f"a step of job {allocated}, which is this allocation")
        else:
            number = job.submit(path)
            folder.note(replace(facts, job=number))
            say(f"job {number} submitted; what Slurm says of it is in {folder.path / 'slurm.out'}")
        folder.forget_files(but=facts.files)

    @in_state()
    def deployed(self, run: str) -> tuple[Config, Cargo]:
        """Return what the run was brought up with. Raises RunNotFound."""
        return JobFolder(run).read()

    @in_state()
    def runs(self) -> list[str]:
        """Return the names of the user's runs under Slurm, sorted."""
        return slurm_runs()

    def leaving(self) -> list[str]:
        """Return nothing: a run is there until all of it has ended."""
        return []

    @in_state()
    def tasks(self, run: str) -> list[TaskState]:
        """Return how each node stands, and the notice board. Raises RunNotFound, EngineError."""
        folder = JobFolder(run)
        facts = folder.job_facts()
        found = job.state(facts.job) if facts.job else job.JobState()
        live = at_work(facts, run) if facts.allocation else found.there
        return [_task(folder, facts, name, found, live) for name in folder.names()]

    @in_state()
    def events(self, run: str, since: float | None = None) -> list[Event]:
        """Return the board's events so far. Raises RunNotFound."""
        return files.events(_existing(run), since)

    def watch(self, run: str) -> Iterator[Update]:
        """Yield what happens, through requeues, until the verdict, the job's end or the run's removal. Raises RunNotFound."""
        folder = _existing(run)
        return self._watch(folder)

    def _watch(self, folder: JobFolder) -> Iterator[Update]:
        board = files.Tail(folder.events)
        readers = {name: files.Log(name, folder.log(name), from_end=True) for name in folder.names()}
        states: dict[str, TaskState] = {}
        verdict_at, asked = None, float("-inf")
        while True:
            exists, ended = folder.exists, not folder.alive("")
            if exists and time.monotonic() > asked + _ASK_EVERY:
                asked = time.monotonic()
                for state in self._tasks_or_none(folder.run):
                    if states.get(state.node) != state:
                        states[state.node] = state
                        yield state
            for name in folder.names():
                yield from readers.setdefault(name, files.Log(name, folder.log(name))).log_lines()
            for line in board.lines():
                if event := Event.from_line(line):
                    verdict_at = verdict_at or (time.monotonic() if event.kind == VERDICT else None)
                    yield event
            if verdict_at is not None and (ended or time.monotonic() - verdict_at > _TRAIL):
                return
            if not exists or (ended and verdict_at is None):
                yield from _last_words(folder)
                return
            time.sleep(_POLL)

    def _tasks_or_none(self, run: str) -> list[TaskState]:
        try:
            return self.tasks(run)
        except (StackError, EngineError):
            return []

    def logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        say: Say | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output of all nodes. Raises RunNotFound. There is nothing to `say`: files can always be read."""
        return files.logs(_existing(run), follow=follow, tail=tail, since=since, node=node)

    @in_state()
    def stop(self, run: str, say: Say) -> None:
        """Let the ranks save and leave, and the job end; `up` submits one that goes on from there. Raises RunNotFound."""
        folder = _existing(run)
        with folder.locked(say):
            _end(folder.job_facts(), run)
        say(f"{run} stopped")

    @in_state()
    def down(self, run: str, say: Say) -> None:
        """End the job and remove the run; events and logs stay in its folder. Raises RunNotFound."""
        folder = _existing(run)
        with folder.locked(say):
            _end(folder.job_facts(), run)
            folder.remove()
        say(f"{run} removed; its events and logs are in {folder.path}")


@in_state()
def generate(plan: Plan, output: Path) -> Path:
    """Write the script that `up` would submit to `output`, and what it needs into the run's folder, whose part is returned.

    Raises StateError.
    """
    folder = JobFolder(plan.run)
    facts = _facts(plan, folder, None)
    text = script(plan, _site(folder, facts))
    folder.write_files(plan, facts, text)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    return folder.path / facts.files


def _site(folder: JobFolder, facts: Facts) -> Site:
    return Site(folder.path.absolute(), facts.cwd, sys.executable, os.environ.get("PYTHONPATH", ""))


def _facts(plan: Plan, folder: JobFolder, before: Facts | None) -> Facts:
    return Facts(
        files=files_in(Site(PurePath(folder.path), "", ""), plan).name,
        code=tuple(item.name for item in plan.cargo.code),
        secrets=tuple(item.name for item in plan.cargo.secrets),
        nodes=len(plan.nodes),
        stop_grace=plan.config.runner.stop_grace,
        cwd=before.cwd if before else str(Path.cwd()),
    )


def _same(folder: JobFolder, plan: Plan, before: Facts) -> bool:
    """Whether the job that is there was submitted with what the plan says."""
    submitted = folder.path / before.files / SCRIPT
    wanted = script(plan, _site(folder, _facts(plan, folder, before)))
    return submitted.exists() and submitted.read_text(encoding="utf-8") == wanted


def _existing(run: str) -> JobFolder:
    folder = JobFolder(run)
    folder.job_facts()
    return folder


def _task(folder: JobFolder, facts: Facts, name: str, found: job.JobState, live: bool) -> TaskState:
    said = node_state(folder.path, name)
    if live and not facts.allocation and not found.runs:
        return TaskState(name, "", "pending", f"job {facts.job}: {found.reason}" if found.reason else f"job {facts.job}")
    if said is None or said.attempt.job != facts.job:
        return TaskState(name, "", "starting" if live else "shutdown", "" if live else found.state.lower())
    if not live and said.state in ("running", "failed"):
        return TaskState(name, said.host, "shutdown", f"job {facts.job}: {found.state.lower() or 'has ended'}", said.exit_code)
    reason = f"exit code {said.exit_code}" if said.exit_code else ""
    return TaskState(name, said.host, said.state, reason, said.exit_code)


def _end(facts: Facts, run: str) -> None:
    """Let the ranks save and leave, and see the job, or the step, gone. Raises StackError if it stays."""
    if not facts.job:
        return
    if facts.allocation:
        for signal, patience in ((LEAVE, facts.stop_grace), ("KILL", _GOODBYE)):
            for step in job.steps(facts.job, run):
                job.tell(step, signal)
            if job.gone(facts.job, patience, step=run):
                return
    else:
        if job.state(facts.job).runs:
            job.tell(facts.job, LEAVE)
            end = time.monotonic() + facts.stop_grace
            while time.monotonic() < end and job.state(facts.job).runs:
                time.sleep(_POLL)
        if job.state(facts.job).there:  # waiting, or queued again by itself in this moment, or deaf
            job.tell(facts.job)
        if job.gone(facts.job, facts.stop_grace + _GOODBYE):
            return
    raise StackError("Slurm has not ended it", place=f"job {facts.job}", hint=f"scancel --full {facts.job}, then the same command again")


def _await_step(allocated: str, run: str, folder: JobFolder) -> None:
    end = time.monotonic() + _GOODBYE
    while not job.steps(allocated, run) and not (folder.path / "node0.state").exists():
        if time.monotonic() > end:
            raise StackError("srun has not started", place=f"allocation {allocated}", hint=f"cat {folder.path / 'slurm.out'}")
        time.sleep(_POLL)


def _last_words(folder: JobFolder) -> Iterator[LogLine]:
    """A job that ended without a verdict: Slurm may have said why."""
    try:
        lines = (folder.path / "slurm.out").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_LAST_WORDS:]:
        yield LogLine("slurm", line)
