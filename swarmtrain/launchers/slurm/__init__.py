"""The Slurm launcher: a run is one Slurm job, with a supervisor on each of the job's nodes.

`deploy` writes one sbatch script and submits it (swarmtrain.render.sbatch_script documents what the script does). The run's folder is in
the home directory that login nodes and compute nodes share; later processes of the same user find the run by this folder. Inside an
allocation (salloc), the same script is started in the background of the user's shell, and its srun uses the allocation's nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from swarmtrain.atomic_file import SECRET_MODE, write_text_atomically
from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import Action, Finding, LogLine, NodeCommand, ProgressReporter, RunOverview, RunUpdate, TaskState
from swarmtrain.launchers.common.history_store import resolve_run_folder
from swarmtrain.launchers.common.local_run_folder import hold_run_lock, translate_os_errors, translate_os_errors_in_methods
from swarmtrain.launchers.common.run_overviews import read_overviews
from swarmtrain.launchers.slurm import slurm_cli
from swarmtrain.launchers.slurm.slurm_run_folder import (
    SCRIPT_FILE,
    SlurmHost,
    SlurmRunFolder,
    SlurmRunRecord,
    is_job_active,
    list_slurm_runs,
    read_node_state,
)
from swarmtrain.launchers.ssh import update_stream
from swarmtrain.launchers.ssh.host_connections import LOCALHOST, HostGroup
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EVENT_OUTCOME, RENDEZVOUS_SERVICE, Event
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity
from swarmtrain.render.sbatch_script import (
    GRACEFUL_EXIT_SIGNAL,
    JobLayout,
    build_apptainer_command_prefix,
    get_job_files_folder,
    render_sbatch_script,
)

_MAX_NODES = 10_000
_POLL_SECONDS = 0.1
_CLEANUP_SECONDS = 30.0  # time for Slurm to clean up after a job
_FINAL_LINES = 10


@translate_os_errors_in_methods
class SlurmLauncher:
    """Launcher for runs under Slurm. Implements swarmtrain.launchers.base.Launcher, which documents each method."""

    capabilities = find_capabilities("slurm")

    @staticmethod
    @translate_os_errors()
    def write_deployment_file(plan: Plan, output: Path) -> str:
        """The file is the sbatch script that `deploy_run` would submit. Also writes the files that it needs to the run's folder.

        Raises StateDirectoryError if a file cannot be written.
        """
        folder, output = SlurmRunFolder(resolve_run_folder(plan.run)), output.with_suffix(".sbatch")
        record = _build_run_record(plan, folder, None)
        script_text = render_sbatch_script(plan, _build_job_layout(folder, record))
        folder.write_job_files(plan, record, script_text)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(output, script_text, mode=SECRET_MODE)  # it contains the values of runner.env
        return f"wrote {output}, and the files that it needs to {folder.path / record.files}\nnext: sbatch {output}"

    @property
    def location(self) -> str:
        return "Slurm"

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """There are more machines than any plan needs: Slurm chooses the actual machines when the job starts."""
        return Inventory("Slurm", (Machine(host="any"),) * _MAX_NODES)

    def check_plan(self, plan: Plan) -> list[Finding]:
        if allocation_id := slurm_cli.find_allocation_id():
            allocated_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", _MAX_NODES))
            shortage = Finding(
                f"allocation {allocation_id}",
                f"has {allocated_nodes} nodes, but {len(plan.nodes)} are requested",
                "request fewer nodes with -o runner.nodes=N",
            )
            return [shortage] if allocated_nodes < len(plan.nodes) else []
        folder = SlurmRunFolder(resolve_run_folder(plan.run))
        try:
            slurm_cli.check_sbatch_script(render_sbatch_script(plan, _build_job_layout(folder, _build_run_record(plan, folder, None))))
        except EngineError as error:
            return [Finding("Slurm", error.message, error.hint)]
        return []

    def plan_changes(self, plan: Plan) -> list[Action]:
        folder = SlurmRunFolder(resolve_run_folder(plan.run))
        previous = folder.find_record()
        if previous is None or not is_job_active(previous, plan.run):
            return [Action("submit", "a job", "the run is new" if previous is None else f"job {previous.job} has ended")]
        if _is_job_unchanged(folder, plan, previous):
            return []
        is_running = previous.allocation or slurm_cli.read_job_state(previous.job).is_running
        return [
            Action("end", f"job {previous.job}", "differs from the plan; its ranks save a checkpoint and exit", is_running),
            Action("submit", "a job", "resumes from that checkpoint"),
        ]

    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        """If a job of the run exists and differs, its ranks first save a checkpoint and exit."""
        folder = SlurmRunFolder(resolve_run_folder(plan.run))
        with hold_run_lock(folder.run, report_progress):
            previous = folder.find_record()
            is_active = previous is not None and is_job_active(previous, plan.run)
            if is_active and previous and _is_job_unchanged(folder, plan, previous):
                return
            identity = previous.identity if previous else create_run_identity()
            record = replace(_build_run_record(plan, folder, previous if is_active else None), identity=identity)
            if is_active and previous:
                report_progress(f"job {previous.job}: its ranks save a checkpoint and exit")
                _stop_job(previous, plan.run)
            try:
                self._submit_job(folder, plan, record, report_progress, resumes=previous is not None)
            except BaseException:
                if previous is None:
                    folder.remove_run()
                raise

    def _submit_job(
        self, run_folder: SlurmRunFolder, plan: Plan, record: SlurmRunRecord, report_progress: ProgressReporter, *, resumes: bool
    ) -> None:
        script_path = run_folder.write_job_files(plan, record, render_sbatch_script(plan, _build_job_layout(run_folder, record)))
        run_folder.write_record(record)  # the nodes of the job read it
        if not resumes or any(event.kind == EVENT_OUTCOME for event in self.read_events(plan.run)):
            run_folder.rotate_events()
        for state_file in run_folder.path.glob("*.state"):
            state_file.unlink(missing_ok=True)
        if allocation_id := slurm_cli.find_allocation_id():
            run_folder.write_record(replace(record, job=allocation_id, allocation=True))
            slurm_cli.start_script_in_allocation(script_path, run_folder.path / "slurm.out")
            _wait_for_job_step(allocation_id, plan.run, run_folder)
            report_progress(f"started as a step of job {allocation_id}, the current allocation")
        else:
            job_id = slurm_cli.submit_job(script_path)
            run_folder.write_record(replace(record, job=job_id))
            report_progress(f"job {job_id} submitted; Slurm's output is in {run_folder.path / 'slurm.out'}")
        run_folder.remove_job_files(kept_folder=record.files)

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        return SlurmRunFolder(resolve_run_folder(run)).load_deployment()

    def read_identity(self, run: str) -> RunIdentity:
        return SlurmRunFolder(resolve_run_folder(run)).read_job_record().identity

    def read_placement(self, run: str) -> Placement:
        """Always empty: Slurm places the nodes of each job."""
        return FRESH_PLACEMENT

    def list_runs(self) -> list[str]:
        return list_slurm_runs()

    def read_overviews(self) -> list[RunOverview]:
        return read_overviews(self)

    def list_terminating_runs(self) -> list[str]:
        """Always empty: a run is listed until its removal is complete."""
        return []

    def list_tasks(self, run: str) -> list[TaskState]:
        folder = _open_existing_run_folder(run)
        return [TaskState(name, **state) for name in folder.list_process_names() if (state := folder.describe_process_state(name))]

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        _open_existing_run_folder(run)
        return update_stream.read_events(SlurmHost(), run, since, tail)

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        """Continues across requeues. Also ends when the job ends."""
        return _stream_run_updates(_open_existing_run_folder(run))

    def stream_logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        report_progress: ProgressReporter | None = None,
    ) -> Iterator[LogLine]:
        hosts = _connect_run_folder(_open_existing_run_folder(run))
        return update_stream.stream_logs(*hosts, run, follow=follow, tail=tail, since=since, node=node, report_progress=report_progress)

    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        """The command runs as a further step of the job, in the node's container if it has one.

        Raises StackError if the node has not started.
        """
        folder = SlurmRunFolder(resolve_run_folder(run))
        record = folder.read_job_record()
        node_state = read_node_state(folder.path, node)
        if node_state is None:
            raise StackError("has not started", place=f"run {run} {node}", hint=f"swarmtrain status {run}")
        prefix = build_apptainer_command_prefix(folder.load_deployment()[0], _build_job_layout(folder, record))
        return NodeCommand(
            (*slurm_cli.build_step_argv(record.job, node_state.host, with_terminal=with_terminal), *prefix, *argv), cwd=record.cwd
        )

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Also ends the job: a deploy submits a new one, which resumes the run."""
        folder = _open_existing_run_folder(run)
        with hold_run_lock(folder.run, report_progress):
            _stop_job(folder.read_job_record(), run)
        report_progress(f"{run} stopped")

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        """The events and logs stay in the folder of the run."""
        folder = _open_existing_run_folder(run)
        with hold_run_lock(folder.run, report_progress):
            _stop_job(folder.read_job_record(), run)
            records_path = folder.records_path
            folder.remove_run()
        report_progress(f"{run} removed; its events and logs are in {records_path}")


def _build_job_layout(run_folder: SlurmRunFolder, record: SlurmRunRecord) -> JobLayout:
    return JobLayout(run_folder.path.absolute(), record.cwd, sys.executable, os.environ.get("PYTHONPATH", ""))


def _build_run_record(plan: Plan, run_folder: SlurmRunFolder, previous_record: SlurmRunRecord | None) -> SlurmRunRecord:
    return SlurmRunRecord(
        files=get_job_files_folder(JobLayout(PurePath(run_folder.path), "", ""), plan).name,
        code=tuple(item.name for item in plan.cargo.code),
        secrets=tuple(item.name for item in plan.cargo.secrets),
        nodes=len(plan.nodes),
        stop_grace=plan.config.runner.stop_grace,
        cwd=previous_record.cwd if previous_record else str(Path.cwd()),
    )


def _is_job_unchanged(run_folder: SlurmRunFolder, plan: Plan, previous_record: SlurmRunRecord) -> bool:
    """Return whether the run's existing job was submitted with the sbatch script that `plan` renders to."""
    submitted_script = run_folder.path / previous_record.files / SCRIPT_FILE
    desired_script = render_sbatch_script(plan, _build_job_layout(run_folder, _build_run_record(plan, run_folder, previous_record)))
    return submitted_script.exists() and submitted_script.read_text(encoding="utf-8") == desired_script


def _open_existing_run_folder(run: str) -> SlurmRunFolder:
    folder = SlurmRunFolder(resolve_run_folder(run))
    folder.read_job_record()
    return folder


def _connect_run_folder(run_folder: SlurmRunFolder) -> tuple[RunRecord, HostGroup]:
    """Return the run as one of processes on this machine, and the group of this machine."""
    nodes = {name: LOCALHOST for name in run_folder.list_process_names() if name != RENDEZVOUS_SERVICE}
    return RunRecord(nodes=nodes), HostGroup([SlurmHost()], {})


def _stream_run_updates(run_folder: SlurmRunFolder) -> Iterator[RunUpdate]:
    has_outcome = False
    for update in update_stream.watch_run(*_connect_run_folder(run_folder), run_folder.run):
        has_outcome = has_outcome or (isinstance(update, Event) and update.kind == EVENT_OUTCOME)
        yield update
    if not has_outcome:
        yield from _read_last_output_lines(run_folder)


def _stop_job(record: SlurmRunRecord, run: str) -> None:
    """Request that the ranks save a checkpoint and exit, and wait until the job (or job step) has ended.

    Raises StackError if it does not end.
    """
    if not record.job:
        return
    if record.allocation:
        for signal, timeout in ((GRACEFUL_EXIT_SIGNAL, record.stop_grace), ("KILL", _CLEANUP_SECONDS)):
            for step in slurm_cli.list_job_steps(record.job, run):
                slurm_cli.signal_or_cancel_job(step, signal)
            if slurm_cli.wait_until_job_gone(record.job, timeout, step_name=run):
                return
    else:
        if slurm_cli.read_job_state(record.job).is_running:
            slurm_cli.signal_or_cancel_job(record.job, GRACEFUL_EXIT_SIGNAL)
            deadline = time.monotonic() + record.stop_grace
            while time.monotonic() < deadline and slurm_cli.read_job_state(record.job).is_running:
                time.sleep(_POLL_SECONDS)
        if slurm_cli.read_job_state(record.job).is_active:  # pending, just requeued by its own script, or ignoring the signal
            slurm_cli.signal_or_cancel_job(record.job)
        if slurm_cli.wait_until_job_gone(record.job, record.stop_grace + _CLEANUP_SECONDS):
            return
    raise StackError(
        "Slurm did not end the job", place=f"job {record.job}", hint=f"scancel --full {record.job}, then run the same command again"
    )


def _wait_for_job_step(job_id: str, run: str, run_folder: SlurmRunFolder) -> None:
    deadline = time.monotonic() + _CLEANUP_SECONDS
    while not slurm_cli.list_job_steps(job_id, run) and not (run_folder.path / "node0.state").exists():
        if time.monotonic() > deadline:
            raise StackError("srun has not started", place=f"allocation {job_id}", hint=f"cat {run_folder.path / 'slurm.out'}")
        time.sleep(_POLL_SECONDS)


def _read_last_output_lines(run_folder: SlurmRunFolder) -> Iterator[LogLine]:
    """Yield the last lines of Slurm's output, which may explain why a job ended without an outcome."""
    try:
        lines = (run_folder.path / "slurm.out").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_FINAL_LINES:]:
        yield LogLine("slurm", line)
