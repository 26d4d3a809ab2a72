"""The launchers `ssh` and `ssh_docker`: the nodes of a run are processes (`ssh`) or containers (`ssh_docker`) on hosts reached over SSH.

Each host has a folder of the run, and a process keeper for each process; a remote agent gives the launcher access to them. A run outlives
the launcher process. A later launcher process finds the run's hosts in an index on this machine, and reads the state of the run from these
hosts. The launcher `local` is derived from this one.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain.atomic_file import PUBLIC_MODE, SECRET_MODE, open_private_file
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.errors import HostError, RunNotFound, StackError, SwarmtrainError
from swarmtrain.launchers.base import Action, Finding, LogLine, NodeCommand, ProgressReporter, RunOverview, RunUpdate, TaskState
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.local_run_folder import translate_os_errors_in_methods
from swarmtrain.launchers.common.run_overviews import read_overviews
from swarmtrain.launchers.common.stack_file import write_stack_file
from swarmtrain.launchers.ssh import plan_checks, update_stream
from swarmtrain.launchers.ssh.host_connections import LOCALHOST, ConnectionPool, Host, HostGroup, list_hosts
from swarmtrain.launchers.ssh.image_pull import pull_image
from swarmtrain.launchers.ssh.process_specs import HostContext, build_container_exec_argv, build_host_exec_argv, build_process_specs
from swarmtrain.launchers.ssh.run_index import RunIndex, RunRecord
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.placement import Placement
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EVENT_OPERATION, PROTOCOL_VERSION, RENDEZVOUS_SERVICE, RUN_KEY_NAME, Event
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity
from swarmtrain.protocol.run_key import create_run_key
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.remote.run_folder import EVENTS_FILE, MARKER_FILE
from swarmtrain.remote.timestamped_log import format_timestamp_prefix

_POLL_SECONDS = 0.5
_STOP_MARGIN_SECONDS = 30.0
_COORDINATOR_GRACE_SECONDS = 5.0
_COORDINATOR_START_TIMEOUT_SECONDS = 60.0
_DOCKER_NOISE_PATTERN = re.compile(r"(Run|See) 'docker|Error: failed to start containers")
"""Pattern of the docker CLI's output lines that do not state the reason of an error."""
_COORDINATOR_MAX_RESTARTS = 2
_UNKNOWN_HOST_MESSAGE = "Could not resolve hostname"
_KEY_FILE = f"secrets/{RUN_KEY_NAME}"


@dataclass(frozen=True)
class DesiredState:
    """Processes that a plan requires on its hosts, and the processes that already exist there."""

    record: RunRecord
    specs: dict[str, list[ProcessSpec]]
    host_states: dict[str, dict[str, Any]]
    unchanged: frozenset[tuple[str, str]]
    """(host, process name) of the existing processes that match the plan."""

    @property
    def processes_to_start(self) -> list[tuple[str, ProcessSpec]]:
        """The processes to start, with their hosts, the coordinator first. A completed process is not restarted."""
        return [(host, spec) for host, specs in self.specs.items() for spec in specs if self._needs_start(host, spec.name)]

    @property
    def processes_to_stop(self) -> dict[str, list[str]]:
        """Names of the processes to stop, by host."""
        stale = {
            host: [name for name in host_state["specs"] if (host, name) not in self.unchanged]
            for host, host_state in self.host_states.items()
        }
        return {host: names for host, names in stale.items() if names}

    def is_process_planned(self, host: str, name: str) -> bool:
        """Return whether the plan contains the process `name` on `host`."""
        return any(spec.name == name for spec in self.specs.get(host, []))

    def _needs_start(self, host: str, name: str) -> bool:
        host_state = self.host_states[host]
        state = host_state["states"].get(name)
        return (host, name) not in self.unchanged or (name not in host_state["alive"] and (state is None or state["state"] != "complete"))


@translate_os_errors_in_methods
class SshLauncher:
    """Launcher for runs on hosts reached over SSH. Implements swarmtrain.launchers.base.Launcher, which documents each method."""

    runner_type = "ssh"
    capabilities = find_capabilities("ssh")
    write_deployment_file = staticmethod(write_stack_file)

    def __init__(self) -> None:
        self._connections = ConnectionPool()
        self._index = RunIndex(self.runner_type, self._connections)

    @property
    def location(self) -> str:
        return "its hosts"

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """The machines are the hosts in the config, by default this machine. A host may be unavailable."""
        interpreter = _resolve_interpreter(runner)
        names = [host.name for host in list_hosts(runner)]
        with self._connections.build_host_group(names, dict.fromkeys(names, interpreter)) as host_group:
            host_info, failed = host_group.collect_results_and_errors(lambda host: host.call_agent("describe_host"))
        machines = [
            Machine(
                host=name,
                unavailable_reason=f"not usable over SSH ({failed[name].message})" if name in failed else "",
                unavailable_hint=(failed[name].hint or "") if name in failed else "",
                is_unknown=name in failed and _UNKNOWN_HOST_MESSAGE in failed[name].message,
                resources={runner.swarm.generic_resource: host_info[name]["gpus"]} if name in host_info else {},
            )
            for name in names
        ]
        return Inventory("the hosts that the config lists, over SSH" if runner.hosts else "this machine", tuple(machines))

    def check_plan(self, plan: Plan) -> list[Finding]:
        with self._connect_planned_hosts(plan) as host_group:
            is_deployed = plan.run in self.list_runs()
            return plan_checks.collect_findings(plan, host_group, ports=() if is_deployed else (plan.master_port,))

    def plan_changes(self, plan: Plan) -> list[Action]:
        with self._connect_all_hosts(plan) as host_group:
            desired = self._compute_desired_state(plan, host_group)
        removals = [
            Action("end", f"{name}{_format_host(' on', host)}", "is not in the plan")
            for host, names in desired.processes_to_stop.items()
            for name in names
            if not desired.is_process_planned(host, name)
        ]
        starts = []
        for host, spec in desired.processes_to_start:
            exists = spec.name in desired.host_states[host]["specs"]
            cause = "has changed, or has exited" if exists else "is new"
            starts.append(
                Action("start", f"{spec.name}{_format_host(' on', host)}", cause, spec.name in desired.host_states[host]["alive"])
            )
        return [*removals, *starts]

    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        with self._connect_all_hosts(plan) as host_group, _hold_run_lock(host_group, plan.run, report_progress):
            desired = self._compute_desired_state(plan, host_group)
            is_first_deploy = not any(host_state["marker"] for host_state in desired.host_states.values())
            try:
                if self.capabilities.runs_in_containers:
                    plan, desired = self._pull_image(plan, host_group, desired, report_progress)
                self._reconcile_processes(plan, host_group, desired, report_progress)
            except BaseException:
                if is_first_deploy:
                    self._roll_back_first_deploy(host_group, plan.run)
                raise

    def _pull_image(
        self, plan: Plan, host_group: HostGroup, desired: DesiredState, report_progress: ProgressReporter
    ) -> tuple[Plan, DesiredState]:
        """Pull the image on all hosts, and return plan and state without hosts that lack it. Raises ImageError if too few are left."""
        errors = pull_image(plan, host_group, [host for host, specs in desired.specs.items() if specs], report_progress)
        if not errors:
            return plan, desired
        reduced = plan.exclude_hosts({host: (error.message, error.hint or "") for host, error in errors.items()})
        if not reduced.can_form_world:
            raise next(iter(errors.values()))
        for error in errors.values():
            report_progress(f"{error}; the run starts without this host. To fix it: {error.hint}")
        return reduced, self._compute_desired_state(reduced, host_group)

    def _reconcile_processes(self, plan: Plan, host_group: HostGroup, desired: DesiredState, report_progress: ProgressReporter) -> None:
        run, record = plan.run, desired.record
        removed_hosts = [host for host, host_state in desired.host_states.items() if host_state["marker"] and host not in desired.specs]
        # Until the deploy is complete, the index also lists the hosts that the plan removes from the run: if the deploy is interrupted,
        # a later command finds all processes.
        for host in record.interpreters.keys() - desired.host_states.keys() - set(record.nodes.values()):
            report_progress(f"{host} is unreachable; a later command that reaches it will stop its processes")
        pythons = {**record.interpreters, **{host: host_group.get_interpreter(host) for host in removed_hosts}}
        RecordedRun(run, record.identity).create_folder()
        self._index.write_record(run, replace(record, interpreters=pythons))
        files = _build_run_files(plan, record, _find_run_key(host_group, desired, run))
        host_group.run_on_hosts(lambda host: host.call_agent("write_files", run=run, files=files), list(desired.specs))
        to_stop = desired.processes_to_stop
        host_group.run_on_hosts(
            lambda host: host.call_agent(
                "stop_processes", timeout=_compute_stop_timeout(record), run=run, names=to_stop[host.name], grace=record.stop_grace
            ),
            to_stop,
        )
        self._download_history(host_group, RecordedRun(run, record.identity), removed_hosts)
        for host, names in to_stop.items():
            if removed_names := [name for name in names if not desired.is_process_planned(host, name)]:
                host_group.hosts[host].call_agent("delete_process_files", run=run, names=removed_names)
                report_progress(f"{', '.join(removed_names)} removed{_format_host(' from', host)}")
        host_group.run_on_hosts(lambda host: host.call_agent("remove_run", run=run), removed_hosts)
        self._index.write_record(run, record)
        to_start = desired.processes_to_start
        if any(spec.name == RENDEZVOUS_SERVICE for _, spec in to_start):
            host_group.run_on_hosts(lambda host: host.call_agent("rotate_events", run=run), list(desired.specs))
        for is_coordinator_pass in (True, False):
            now = {
                host: [
                    asdict(spec)
                    for planned_host, spec in to_start
                    if planned_host == host and (spec.name == RENDEZVOUS_SERVICE) is is_coordinator_pass
                ]
                for host, _ in to_start
            }
            now = {host: specs for host, specs in now.items() if specs}
            host_group.run_on_hosts(lambda host, now=now: host.call_agent("start_processes", run=run, specs=now[host.name]), list(now))  # type: ignore[misc]
            for host, specs in now.items():
                report_progress(f"{', '.join(spec['name'] for spec in specs)} started{_format_host(' on', host)}")
        if any(spec.name == RENDEZVOUS_SERVICE for _, spec in to_start):
            _wait_for_coordinator(host_group.hosts[record.coordinator_host], run)

    def _roll_back_first_deploy(self, host_group: HostGroup, run: str) -> None:
        """Remove everything that a first deploy has created. A host that cannot be reached is kept in the index."""
        _, failed = host_group.collect_results_and_errors(lambda host: _remove_run_from_host(host, run))
        if failed:
            with contextlib.suppress(RunNotFound):
                self._index.write_record(run, self._index.read_record(run).restrict_to_hosts(list(failed)))
        else:
            self._index.remove_record(run)

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        """Reads from the first reachable host. Raises HostError if no host is reachable."""
        record, host_group = self._index.read_record_and_hosts(run)
        record.check_protocol(run)
        names = ["deployed.json", *(f"code/{name}" for name in record.code), *(f"secrets/{name}" for name in record.secrets)]
        with host_group:
            last_error: HostError | None = None
            for host in host_group.hosts.values():
                try:
                    files = {name: base64.b64decode(text) for name, text in host.call_agent("read_files", run=run, names=names).items()}
                except HostError as error:
                    last_error = error
                    continue
                code = tuple(RunFile.from_content(name, files[f"code/{name}"]) for name in record.code)
                secrets = tuple(RunFile.from_content(name, files[f"secrets/{name}"]) for name in record.secrets)
                return Config.from_json(files["deployed.json"].decode()), Cargo(code, secrets)
        raise last_error or RunNotFound("has no hosts", place=f"run {run}")

    def read_identity(self, run: str) -> RunIdentity:
        return self._index.read_record(run).identity

    def read_placement(self, run: str) -> Placement:
        """Reads the index on this machine."""
        record = self._index.read_record(run)
        return Placement(record.nodes, record.coordinator_host)

    def list_runs(self) -> list[str]:
        return self._index.list_runs()

    def read_overviews(self) -> list[RunOverview]:
        return read_overviews(self)

    def list_terminating_runs(self) -> list[str]:
        """Some hosts of these runs could not be reached."""
        return self._index.list_runs(terminating=True)

    def list_tasks(self, run: str) -> list[TaskState]:
        """Includes the processes on unreachable hosts."""
        record, host_group = self._index.read_record_and_hosts(run)
        with host_group:
            host_states, failed = host_group.collect_results_and_errors(lambda host: host.call_agent("inspect_run", run=run))
        responses = {**host_states, **failed}
        states = {state.node: state for host in responses for state in update_stream.build_task_states(record, host, responses[host])}
        return [states.get(name) or TaskState(name, record.get_displayed_host(name), "starting") for name in record.hosts_by_process]

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        record, host_group = self._index.read_record_and_hosts(run)
        with host_group:
            return update_stream.read_events(host_group.hosts[record.coordinator_host], run, since, tail)

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        return update_stream.watch_run(*self._index.read_record_and_hosts(run), run)

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
        return update_stream.stream_logs(
            *self._index.read_record_and_hosts(run), run, follow=follow, tail=tail, since=since, node=node, report_progress=report_progress
        )

    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        record, host_group = self._index.read_record_and_hosts(run)
        if node not in record.nodes:
            raise RunNotFound("unknown node", place=f"run {run} {node}")
        host_name = record.nodes[node]
        with host_group:
            host_state = host_group.hosts[host_name].call_agent("inspect_run", run=run)
        spec = ProcessSpec(**host_state["specs"][node])
        if self.capabilities.runs_in_containers:
            command = build_container_exec_argv(spec, argv, with_terminal=with_terminal)
        else:
            command = build_host_exec_argv(spec, f"{host_state['path']}/{node}.spec", argv)
        if host_name == LOCALHOST:
            return NodeCommand(tuple(command))
        return NodeCommand(("ssh", "-t" if with_terminal else "-T", "--", host_name, shlex.join(command)))

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Raises StackError if a host is unreachable: its processes keep running."""
        record, host_group = self._index.read_record_and_hosts(run)
        with host_group, _hold_run_lock(host_group, run, report_progress):
            if failed := _stop_nodes(host_group, run, record):
                raise _build_unreachable_hosts_error(failed, run, "stop")
        report_progress(f"{run} stopped")

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Downloads events and logs first. Files on an unreachable host stay there.

        The raised StackError names the host: call this method again when the host is reachable.
        """
        record, host_group = self._index.read_record_and_hosts(run)
        recorded_run = RecordedRun(run, record.identity)
        with host_group, _hold_run_lock(host_group, run, report_progress):
            failed = _stop_nodes(host_group, run, record)
            reached = [host for host in host_group.hosts if host not in failed]
            host_group.run_on_hosts(
                lambda host: host.call_agent(
                    "stop_processes", timeout=_compute_stop_timeout(record), run=run, names=None, grace=_COORDINATOR_GRACE_SECONDS
                ),
                reached,
            )
            self._download_history(host_group, recorded_run, reached)
            host_group.run_on_hosts(lambda host: host.call_agent("remove_run", run=run), reached)
            if failed:
                self._index.write_record(run, record.restrict_to_hosts(list(failed)))
                raise _build_unreachable_hosts_error(failed, run, "down")
            self._index.remove_record(run)
        report_progress(f"{run} removed; its events and logs are in {recorded_run.folder}")

    def _find_run_record(self, run: str) -> RunRecord | None:
        with contextlib.suppress(RunNotFound):
            return self._index.read_record(run)
        return None

    def _connect_all_hosts(self, plan: Plan) -> HostGroup:
        """Return connections to the hosts of the plan, and to the hosts that the run uses now, except those that the plan misses."""
        previous = self._find_run_record(plan.run)
        return self._connect_planned_hosts(plan, previous.interpreters if previous else {})

    def _connect_planned_hosts(self, plan: Plan, previous_interpreters: dict[str, str] | None = None) -> HostGroup:
        planned = [self._resolve_host(node) for node in plan.nodes]
        pythons = {**(previous_interpreters or {}), **dict.fromkeys(planned, _resolve_interpreter(plan.config.runner))}
        missing = {node.host for node in plan.missing_nodes}
        names = dict.fromkeys([*planned, *(name for name in pythons if name not in missing)])
        return self._connections.build_host_group([*names], pythons)

    def _resolve_host(self, node: PlannedNode) -> str:
        """Return the name of the host on which `node` runs."""
        return node.host

    def _choose_coordinator_address(self, plan: Plan, deployed: RunRecord | None, host_info: dict[str, dict[str, Any]]) -> tuple[str, int]:
        """Return address and port of the coordinator. `deployed`: the record of the run if its coordinator keeps running."""
        address = deployed.address if deployed else resolve_host_address(plan.config.runner, plan.nodes[0].host, host_info)
        return address, plan.master_port

    def _choose_working_folder(self, previous_record: RunRecord | None, *, is_running: bool) -> str:
        """Return the working folder of the ranks: an existing run keeps its own. `is_running`: whether its coordinator is running."""
        return previous_record.cwd if previous_record else str(Path.cwd())

    def _build_host_context(self, plan: Plan, record: RunRecord, host_state: dict[str, Any], host_info: dict[str, Any]) -> HostContext:
        folder = PurePosixPath(host_state["path"])
        return HostContext(
            folder, folder, record.cwd if host_info["cwd"] else host_info["home"], gpus=host_info["gpus"], user=host_info["user"]
        )

    def _compute_desired_state(self, plan: Plan, host_group: HostGroup) -> DesiredState:
        """Return the processes that the plan requires, and the existing ones on its hosts and on hosts that the plan no longer uses."""
        run, previous_record = plan.run, self._find_run_record(plan.run)
        nodes = {node.name: self._resolve_host(node) for node in plan.nodes}
        planned = list(dict.fromkeys(nodes.values()))
        host_states, unreachable = host_group.collect_results_and_errors(lambda host: host.call_agent("inspect_run", run=run))
        for host in unreachable.keys() & planned:
            raise unreachable[host]
        coordinator_host = planned[0]
        marker = host_states[coordinator_host]["marker"]
        deployed = (
            RunRecord.from_dict(marker) if marker is not None and RENDEZVOUS_SERVICE in host_states[coordinator_host]["alive"] else None
        )
        if deployed is not None:
            deployed.check_protocol(run)
        coordinator_stays = deployed is not None and deployed.coordinator_host == coordinator_host
        cwd = self._choose_working_folder(previous_record, is_running=deployed is not None)
        host_info = host_group.run_on_hosts(lambda host: host.call_agent("describe_host", cwd=cwd), planned)
        address, port = self._choose_coordinator_address(plan, deployed if coordinator_stays else None, host_info)
        # The nodes that the run has on hosts which are missing now: their processes may still run there.
        absent_nodes = {
            node.name: node.host
            for node in plan.missing_nodes
            if previous_record and previous_record.nodes.get(node.name) == node.host and node.host not in host_group.hosts
        }
        record = RunRecord(
            # If a host that the plan removes from the run cannot be reached, the next command that changes the run retries.
            interpreters={name: host_group.get_interpreter(name) for name in (*planned, *unreachable, *absent_nodes.values())},
            protocol=PROTOCOL_VERSION,
            nodes=nodes | absent_nodes,
            hosts={node.name: node.host for node in plan.nodes if node.host != nodes[node.name]},
            address=address,
            coordinator_port=port,
            cwd=cwd,
            stop_grace=plan.config.runner.stop_grace,
            code=tuple(item.name for item in plan.cargo.code),
            secrets=tuple(item.name for item in plan.cargo.secrets),
            identity=_find_identity(previous_record, host_states),
        )
        host_contexts = {name: self._build_host_context(plan, record, host_states[name], host_info[name]) for name in planned}
        desired_specs = build_process_specs(plan, record, host_contexts)
        unchanged = frozenset(
            (host, spec.name)
            for host, specs in desired_specs.items()
            for spec in specs
            if coordinator_stays
            and host_states[host]["specs"].get(spec.name) == asdict(spec)
            and host_states[host]["states"].get(spec.name)
        )
        return DesiredState(record, desired_specs, host_states, unchanged)

    def _download_history(self, host_group: HostGroup, recorded_run: RecordedRun, hosts: Sequence[str]) -> None:
        """Append the events and logs on the hosts to the history on this machine, before these files are removed from the hosts."""
        run = recorded_run.name
        histories = host_group.run_on_hosts(
            lambda host: (update_stream.read_log_lines(host, run), update_stream.read_file_lines(host, run, EVENTS_FILE)), list(hosts)
        )
        recorded_run.create_folder()
        for lines, events in histories.values():
            for node in {line.node for line in lines}:
                with open_private_file(recorded_run.folder / f"{node}.log", "a") as file:
                    file.writelines(
                        f"{format_timestamp_prefix(line.time)}{f'[rank {line.rank}] ' if line.rank is not None else ''}{line.text}\n"
                        for line in lines
                        if line.node == node
                    )
            if events:
                with open_private_file(recorded_run.folder / EVENTS_FILE, "a") as file:
                    file.writelines(f"{line}\n" for line in events)


class SshDockerLauncher(SshLauncher):
    """Launcher `ssh_docker`: the same as SshLauncher, with each process in a container."""

    runner_type = "ssh_docker"
    capabilities = find_capabilities("ssh_docker")


def _format_host(preposition: str, host: str) -> str:
    """Return `host` after `preposition`, for messages; an empty string if it is this machine."""
    return "" if host == LOCALHOST else f"{preposition} {host}"


def _resolve_interpreter(runner: RunnerConfig) -> str:
    return runner.python or ("python3" if runner.capabilities.runs_in_containers else sys.executable)


@contextlib.contextmanager
def _hold_run_lock(host_group: HostGroup, run: str, report_progress: ProgressReporter) -> Iterator[None]:
    """Hold the exclusive lock for changes to the run, on the first host that answers. It is released when the connection closes."""
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    holder = _lock_first_reachable_host(host_group, run, owner)
    has_reported = False
    while holder[1]:
        if not has_reported:
            report_progress(f"waiting for another swarmtrain command that is changing {run}: {holder[1]}")
            has_reported = True
        time.sleep(_POLL_SECONDS)
        holder = (holder[0], holder[0].call_agent("lock_run", run=run, owner=owner))
    try:
        yield
    finally:
        with contextlib.suppress(HostError):
            holder[0].call_agent("unlock_run", run=run)


def _lock_first_reachable_host(host_group: HostGroup, run: str, owner: str) -> tuple[Host, str]:
    first_error: HostError | None = None
    for host in host_group.hosts.values():
        try:
            return host, host.call_agent("lock_run", run=run, owner=owner)
        except HostError as error:
            first_error = first_error or error
    raise first_error or RunNotFound("has no hosts", place=f"run {run}")


def _find_identity(previous_record: RunRecord | None, host_states: dict[str, dict[str, Any]]) -> RunIdentity:
    """Return the identity of the existing run, which another machine may have deployed, or a new one."""
    if previous_record:
        return previous_record.identity
    for host_state in host_states.values():
        if host_state["marker"] is not None:
            return RunRecord.from_dict(host_state["marker"]).identity
    return create_run_identity()


def resolve_host_address(runner: RunnerConfig, host_name: str, host_info: dict[str, dict[str, Any]]) -> str:
    """Return the address at which the other hosts reach the host `host_name`: the configured one, else the one to which SSH connected."""
    addresses = {host.name: host.address for host in runner.host_entries}
    if configured := runner.master_addr or addresses.get(host_name):
        return configured
    other_addresses = [info["address"] for name, info in host_info.items() if name != host_name and info["address"]]
    if host_name == LOCALHOST and other_addresses:
        with socket.socket(socket.AF_INET6 if ":" in other_addresses[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other_addresses[0], 1))
            return str(probe.getsockname()[0])
    return "127.0.0.1" if host_name == LOCALHOST else host_info[host_name]["address"] or host_name


def _find_run_key(host_group: HostGroup, desired: DesiredState, run: str) -> bytes:
    """Return the key of the existing run from the first host that has it, or a new key."""
    for name, host_state in desired.host_states.items():
        if host_state["marker"] is not None:
            with contextlib.suppress(SwarmtrainError):  # another version of swarmtrain has deployed the run, without a key
                files = host_group.hosts[name].call_agent("read_files", run=run, names=[_KEY_FILE])
                return base64.b64decode(files[_KEY_FILE])
    return create_run_key()


def _build_run_files(plan: Plan, record: RunRecord, key: bytes) -> dict[str, tuple[str, int]]:
    """Return the files that are sent to each host, by path. The last one is the run's marker file, which contains the record."""
    cargo = plan.cargo
    files = {f"secrets/{item.name}": (item.content, SECRET_MODE) for item in cargo.secrets} | {_KEY_FILE: (key, SECRET_MODE)}
    files |= {f"code/{item.name}": (item.content, PUBLIC_MODE) for item in cargo.code}
    # The configs contain the values of runner.env. In a container, a user other than the owner may have to read the mounted config.json;
    # on the host, only the owner can enter the folder.
    node_config_mode = PUBLIC_MODE if plan.config.runner.capabilities.runs_in_containers else SECRET_MODE
    files |= {
        "deployed.json": (plan.config.to_json().encode(), SECRET_MODE),
        "config.json": (plan.config.to_node_config().to_json().encode(), node_config_mode),
    }
    files |= {MARKER_FILE: (record.to_json().encode(), SECRET_MODE)}
    return {name: (base64.b64encode(content).decode(), mode) for name, (content, mode) in files.items()}


def _compute_stop_timeout(record: RunRecord) -> float:
    return record.stop_grace + _STOP_MARGIN_SECONDS


def _stop_nodes(host_group: HostGroup, run: str, record: RunRecord) -> dict[str, HostError]:
    """Stop the nodes but not the coordinator, which ranks need while they save. Return the errors of unreachable hosts."""

    def stop_host_nodes(host: Host) -> None:
        host_state = host.call_agent("inspect_run", run=run)
        names = [name for name in host_state["specs"] if name != RENDEZVOUS_SERVICE]
        host.call_agent("stop_processes", timeout=_compute_stop_timeout(record), run=run, names=names, grace=record.stop_grace)

    return host_group.collect_results_and_errors(stop_host_nodes)[1]


def _remove_run_from_host(host: Host, run: str) -> None:
    host.call_agent("stop_processes", run=run, names=None, grace=0.0)
    host.call_agent("remove_run", run=run)


def _build_unreachable_hosts_error(errors_by_host: dict[str, HostError], run: str, command_name: str) -> StackError:
    reasons = "; ".join(f"{name}: {error.message}" for name, error in errors_by_host.items())
    return StackError(
        f"processes on unreachable hosts keep running: {reasons}",
        place=f"run {run}",
        hint=f"swarmtrain {command_name} {run} again when the hosts are reachable",
    )


def _wait_for_coordinator(host: Host, run: str) -> None:
    """Wait until the run's coordinator has published an event, for at most 1 min.

    Raises StackError if the coordinator keeps failing: without a coordinator, no restart budget ends the run.
    """
    deadline = time.monotonic() + _COORDINATOR_START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and all(event.kind == EVENT_OPERATION for event in update_stream.read_events(host, run)):
        state = host.call_agent("inspect_run", run=run)["states"].get(RENDEZVOUS_SERVICE)
        if state and state["state"] == "failed" and state["restarts"] >= _COORDINATOR_MAX_RESTARTS:
            printed_lines = [
                line.text for line in update_stream.read_log_lines(host, run) if line.node == RENDEZVOUS_SERVICE and line.text.strip()
            ]
            reason = next(
                (text for text in reversed(printed_lines) if not _DOCKER_NOISE_PATTERN.match(text)), f"exit code {state['exit_code']}"
            )
            raise StackError(reason, place=f"rendezvous on {host.name}", hint="fix this first: the nodes would fail to start as well")
        time.sleep(_POLL_SECONDS)
