"""The local launcher: the nodes of a run are processes on this machine, without Docker and without root.

Each node is a supervisor with the same environment variables as under Swarm, and the nodes use a real rendezvous on loopback ports. A
process keeper restarts each failed process, as Swarm restarts containers. A run outlives the launcher process; a later launcher
process finds the run by its folder.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.errors import RunNotFound
from swarmtrain.inventory import Inventory, Machine
from swarmtrain.launchers.base import Action, Finding, LogLine, NodeCommand, ProgressReporter, RunOverview, RunUpdate, TaskState
from swarmtrain.launchers.common import file_tail
from swarmtrain.launchers.common.local_run_folder import LocalRunFolder, LocalRunRecord, list_local_runs, translate_os_errors
from swarmtrain.launchers.common.run_overviews import read_overviews
from swarmtrain.launchers.common.stack_file import write_stack_file
from swarmtrain.placement import FRESH_PLACEMENT, Placement
from swarmtrain.plan import Plan
from swarmtrain.protocol import PROTOCOL_VERSION, RENDEZVOUS_SERVICE, RUN_KEY_NAME, Event
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.render.process_environment import ENTRYPOINT_MODULE, NodeLayout, build_coordinator_env, build_node_env
from swarmtrain.run_identity import RunIdentity, create_run_identity

_MAX_NODES = 64
_COORDINATOR_GRACE_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"
_NVIDIA_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")


class LocalLauncher:
    """Launcher for runs on this machine. Implements swarmtrain.launchers.base.Launcher."""

    capabilities = find_capabilities("local")
    write_deployment_file = staticmethod(write_stack_file)

    @property
    def location(self) -> str:
        """Description of the backend in messages: this machine."""
        return "this machine"

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """Return an inventory with more machines than any plan needs, all of which are this machine."""
        return Inventory("this machine", (Machine(host="localhost"),) * _MAX_NODES)

    def check_plan(self, plan: Plan) -> list[Finding]:
        """Return a finding if torch is not installed, and a warning if there are more ranks than cores and no GPUs."""
        findings = []
        if importlib.util.find_spec("torch") is None:
            hint = "pip install 'swarmtrain[train]'"
            findings.append(Finding("this machine", f"{sys.executable} cannot find torch, which the ranks need", hint))
        cores = len(os.sched_getaffinity(0))
        if plan.world_size > cores and not _list_visible_gpus():
            findings.append(Finding("this machine", f"{plan.world_size} ranks will share {cores} cores", fatal=False))
        return findings

    @translate_os_errors()
    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        """Start, restart and stop the processes that differ from `plan`. Raises SwarmtrainError if that fails."""
        folder = LocalRunFolder(plan.run)
        with folder.hold_lock(report_progress):
            is_first_deploy = not folder.exists
            try:
                self._reconcile_processes(folder, plan, report_progress)
            except BaseException:
                if is_first_deploy:
                    folder.stop_processes(folder.list_process_names(), 0.0)
                    folder.remove_run()
                raise

    @translate_os_errors()
    def plan_changes(self, plan: Plan) -> list[Action]:
        """Return the changes that `deploy_run` would make to the processes of the run."""
        folder = LocalRunFolder(plan.run)
        existing = folder.list_process_names() if folder.exists else []
        # Read before the processes are compared: a process that another command starts meanwhile then counts as missing, not as different.
        running = {name for name in existing if folder.is_process_alive(name)}
        _, desired, unchanged = _compare_processes_with_plan(folder, plan)
        removals = [Action("end", name, "is not in the plan") for name in existing if name not in desired]
        missing = [name for name in desired if name not in unchanged or _needs_start(folder, name)]
        causes = {name: "has changed, or has exited" if name in existing else "is new" for name in missing}
        return [*removals, *(Action("start", name, cause, name in running) for name, cause in causes.items())]

    def _reconcile_processes(self, run_folder: LocalRunFolder, plan: Plan, report_progress: ProgressReporter) -> None:
        record, desired, unchanged = _compare_processes_with_plan(run_folder, plan)
        stale = [name for name in run_folder.list_process_names() if name not in unchanged]
        run_folder.save_deployment(plan, record)
        if stale:
            run_folder.stop_processes(stale, record.stop_grace)
        for name in stale:
            if name not in desired:
                report_progress(f"{name} removed")
                run_folder.delete_process_files(name)
        if RENDEZVOUS_SERVICE not in unchanged:
            run_folder.rotate_events()
        for name in sorted(desired, key=lambda name: name != RENDEZVOUS_SERVICE):
            if name not in unchanged or _needs_start(run_folder, name):
                run_folder.start_process_keeper(desired[name])
                report_progress(f"{name} started, log in {run_folder.get_log_path(name)}")

    @translate_os_errors()
    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        """Return the config and cargo with which the run was deployed. Raises RunNotFound if the run does not exist."""
        return LocalRunFolder(run).load_deployment()

    @translate_os_errors()
    def read_identity(self, run: str) -> RunIdentity:
        """Return the identity in the run's record. Raises RunNotFound if the run does not exist."""
        return LocalRunFolder(run).read_identity()

    def read_placement(self, run: str) -> Placement:
        """Return an empty placement: all nodes are on this machine."""
        return FRESH_PLACEMENT

    @translate_os_errors()
    def list_runs(self) -> list[str]:
        """Return the names of the runs on this machine, sorted."""
        return list_local_runs()

    def read_overviews(self) -> list[RunOverview]:
        """Return an overview of each run."""
        return read_overviews(self)

    def list_terminating_runs(self) -> list[str]:
        """Return an empty list: a local run is listed until its removal is complete."""
        return []

    def list_tasks(self, run: str) -> list[TaskState]:
        """Return the state of each process, nodes first. Raises RunNotFound if the run does not exist."""
        folder = LocalRunFolder(run)
        hosts = folder.read_record().hosts
        states = []
        for name in folder.list_process_names():
            state = folder.load_process_state(name)
            host = hosts.get(name, socket.gethostname())
            if state is None:
                states.append(TaskState(name, host, "starting"))
                continue
            reason = f"exit code {state.exit_code}" if state.exit_code else ""
            states.append(TaskState(name, host, state.state, reason, state.exit_code))
        return states

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        """Return the coordinator's events so far. Raises RunNotFound."""
        return file_tail.read_events(_open_existing_run_folder(run), since, tail)

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        """Yield updates of the run until its outcome or removal. Raises RunNotFound if the run does not exist."""
        return file_tail.watch_run(_open_existing_run_folder(run), lambda: self._list_tasks_if_available(run))

    def _list_tasks_if_available(self, run: str) -> list[TaskState]:
        try:
            return self.list_tasks(run)
        except RunNotFound:
            return []

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
        """Yield the output of all nodes. Raises RunNotFound. `report_progress` is never called: local log files need no connection."""
        from swarmtrain.launchers.common.file_tail import stream_logs

        return stream_logs(_open_existing_run_folder(run), follow=follow, tail=tail, since=since, node=node)

    @translate_os_errors()
    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        """Return `argv` with the environment and the working folder of the node. Raises RunNotFound."""
        spec = _open_existing_run_folder(run).load_process_spec(node)
        if spec is None:
            raise RunNotFound("unknown node", place=f"run {run} {node}")
        return NodeCommand(tuple(argv), spec.env, spec.cwd)

    @translate_os_errors()
    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Request that the ranks save a checkpoint and exit. The coordinator keeps running, and a deploy resumes the run.

        Raises RunNotFound if the run does not exist.
        """
        folder = _open_existing_run_folder(run)
        with folder.hold_lock(report_progress):
            _stop_nodes(folder)
        report_progress(f"{run} stopped")

    @translate_os_errors()
    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Stop all processes and remove the run; events and logs stay in its folder. Raises RunNotFound if the run does not exist."""
        folder = _open_existing_run_folder(run)
        with folder.hold_lock(report_progress):
            _stop_nodes(folder)
            folder.stop_processes([RENDEZVOUS_SERVICE], _COORDINATOR_GRACE_SECONDS)
            records_path = folder.records_path
            folder.remove_run()
        report_progress(f"{run} removed; its events and logs are in {records_path}")


def _stop_nodes(run_folder: LocalRunFolder) -> None:
    """Stop the nodes, but not the coordinator: ranks that save before they exit still need it."""
    run_folder.stop_processes(
        [name for name in run_folder.list_process_names() if name != RENDEZVOUS_SERVICE], run_folder.read_record().stop_grace
    )


def _open_existing_run_folder(run: str) -> LocalRunFolder:
    folder = LocalRunFolder(run)
    folder.read_record()
    return folder


def _needs_start(run_folder: LocalRunFolder, process_name: str) -> bool:
    """Return whether `process_name` must be started: it was stopped or its process keeper is gone, and it has not completed."""
    state = run_folder.load_process_state(process_name)
    return not run_folder.is_process_alive(process_name) and (state is None or state.state != "complete")


def _compare_processes_with_plan(run_folder: LocalRunFolder, plan: Plan) -> tuple[LocalRunRecord, dict[str, ProcessSpec], set[str]]:
    """Return the run's record, the planned processes by name, and the names of those that already match the plan."""
    coordinator_running = run_folder.is_process_alive(RENDEZVOUS_SERVICE)
    run_folder.identity = run_folder.read_identity() if run_folder.exists else create_run_identity()
    record = _build_run_record(plan, run_folder.identity, run_folder.read_compatible_record() if coordinator_running else None)
    desired = {spec.name: spec for spec in _build_process_specs(run_folder, plan, record)}
    unchanged = {
        name
        for name, spec in desired.items()
        if coordinator_running and run_folder.load_process_spec(name) == spec and run_folder.load_process_state(name) is not None
    }
    return record, desired, unchanged


def _build_run_record(plan: Plan, identity: RunIdentity, previous_record: LocalRunRecord | None) -> LocalRunRecord:
    return LocalRunRecord(
        protocol=PROTOCOL_VERSION,
        identity=identity,
        coordinator_port=previous_record.coordinator_port if previous_record else _find_free_port(),
        cwd=previous_record.cwd if previous_record else str(Path.cwd()),
        stop_grace=plan.config.runner.stop_grace,
        hosts={node.name: node.host for node in plan.nodes},
        code=[item.name for item in plan.cargo.code],
        secrets=[item.name for item in plan.cargo.secrets],
    )


def _build_process_specs(run_folder: LocalRunFolder, plan: Plan, record: LocalRunRecord) -> Iterator[ProcessSpec]:
    layout = NodeLayout(
        coordinator_host=_LOOPBACK,
        bind_address=_LOOPBACK,
        config_path=str(run_folder.path / "config.json"),
        code_folder=run_folder.path / "code",
        secrets_dir=run_folder.path / "secrets",
        log_dir=str(run_folder.path / "logs"),
        coordinator_port=record.coordinator_port,
        key_file=str(run_folder.path / "secrets" / RUN_KEY_NAME),
    )
    content_digest = f"{plan.config.to_node_config().digest}-{plan.cargo.digest}"
    argv = [sys.executable, "-m", ENTRYPOINT_MODULE]
    error_log = str(run_folder.get_log_path(RENDEZVOUS_SERVICE))
    yield ProcessSpec(
        RENDEZVOUS_SERVICE,
        [*argv, "rendezvous"],
        build_coordinator_env(plan, layout, record.identity.id),
        record.cwd,
        str(run_folder.events_path),
        error_log,
        plan.cargo.channel_digest,
    )
    for index, node in enumerate(plan.nodes):
        log = str(run_folder.get_log_path(node.name))
        env = {**_build_resource_env(plan, index), **build_node_env(plan, node, layout)}
        yield ProcessSpec(node.name, [*argv, "node"], env, record.cwd, log, log, content_digest)


def _build_resource_env(plan: Plan, node_index: int) -> dict[str, str]:
    """Return the environment variables that limit a node to its share of this machine's cores, and of its GPUs if there are enough.

    The cores and GPUs are divided by max_nodes, so that scaling does not change the share of the other nodes.
    """
    slots = max(node.slots for node in plan.nodes)
    env = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // (slots * plan.max_nodes)))}
    if "OMP_NUM_THREADS" in os.environ:
        env = {}
    gpus = _list_visible_gpus()
    if plan.nodes[node_index].gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(plan.nodes[node_index].gpus)
    elif len(gpus) >= slots * plan.max_nodes:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slots * node_index : slots * (node_index + 1)])
    return env


def _list_visible_gpus() -> list[str]:
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        return [device for device in visible_devices.split(",") if device]
    return [str(index) for index in range(len(list(_NVIDIA_GPUS_FOLDER.glob("*"))))]


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
