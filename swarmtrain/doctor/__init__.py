"""doctor: find problems that prevent a job from running on this cluster or slow it down. Cheap checks run before a probe on the nodes.

check_registry     registers the checks
cluster_checks     checks on the swarm, as its managers report it
capacity_checks    checks on the machines that the plan uses
probe              runs a probe on every node
probe_results      the results of the probes
node_checks        checks on the nodes
gpu_checks         checks on the nodes' GPUs
link_checks        checks on the network links between the nodes
subnet_check       check of the overlay network's subnet
measurements       what the probes have measured, for the estimates of later plans
report             the results of all checks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from swarmtrain.doctor import (  # importing a module registers its checks
    capacity_checks,
    cluster_checks,
    gpu_checks,
    link_checks,  # noqa: F401
    node_checks,  # noqa: F401
    probe_results,
    subnet_check,  # noqa: F401
)
from swarmtrain.doctor.check_registry import CheckRegistry, EvidenceT
from swarmtrain.doctor.measurements import build_measurement
from swarmtrain.doctor.probe import run_probe
from swarmtrain.doctor.report import CheckResult, DoctorReport
from swarmtrain.errors import EngineError, NodesRefused, PlanError, StackError
from swarmtrain.launchers.base import Finding, Launcher, ProgressReporter, exclude_unusable_hosts
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.measurements import record_measurement
from swarmtrain.launchers.swarm.machines.probed_gpus import record_gpus
from swarmtrain.planning.plan import Plan
from swarmtrain.queueing.request_checks import check_queue_request

_PLAN_EXPECTATION = "the plan can be deployed"


def examine_cluster(report_progress: ProgressReporter) -> DoctorReport:
    """Check the swarm without a plan, by querying its managers, and return the report. Raises EngineError if no manager responds."""
    report_progress("querying the managers")
    return DoctorReport(tuple(_run_checks(cluster_checks.CHECKS, cluster_checks.inspect_cluster(DockerEngine(), None))))


def examine_cluster_without_plan(error: PlanError, report_progress: ProgressReporter, *, has_managers: bool) -> DoctorReport:
    """Return the report for a config for which no plan can be made: the plan's `error`, and the checks of its swarm, if it has one.

    Raises EngineError if no manager of the swarm responds.
    """
    report = examine_cluster(report_progress) if has_managers else DoctorReport(())
    finding = Finding(error.place or "plan", error.message, error.hint)
    return DoctorReport((*report.check_results, CheckResult("plan", _PLAN_EXPECTATION, (finding,))))


def examine_plan(
    launcher: Launcher, plan: Plan, report_progress: ProgressReporter, *, probe: bool = True, step_time_seconds: float = 0.0
) -> DoctorReport:
    """Run all checks for `plan`, some of whose nodes may be missing, and return the report.

    `step_time_seconds`: about how long the probe measures training steps, in seconds; 0: not at all.

    The available nodes of a swarm are probed, unless the cheaper checks have a fatal finding that concerns more than one host. The probe
    is a separate run, which is removed after a few seconds. Raises SwarmtrainError.
    """
    check_results: list[CheckResult] = []
    snapshot = None
    if plan.config.runner.capabilities.has_managers:
        report_progress("querying the managers")
        snapshot = cluster_checks.inspect_cluster(DockerEngine(), plan)
        check_results += _run_checks(cluster_checks.CHECKS, snapshot)
    check_results.append(_check_hosts(plan, snapshot))
    check_results.append(CheckResult("plan", _PLAN_EXPECTATION, (*launcher.check_plan(plan), *check_queue_request(launcher, plan))))
    findings = [finding for check_result in check_results for finding in check_result.findings]
    usable_plan = exclude_unusable_hosts(plan, findings)
    is_blocked = any(finding.fatal and not finding.host for finding in findings)
    if is_blocked or snapshot is None or not probe or not usable_plan.available_nodes:
        return _build_report(usable_plan, check_results)
    run_probes = partial(run_probe, launcher, report_progress=report_progress, step_time_seconds=step_time_seconds)
    return _examine_nodes(run_probes, usable_plan, snapshot, check_results, report_progress)


def _check_hosts(plan: Plan, snapshot: cluster_checks.ClusterSnapshot | None) -> CheckResult:
    """Return the findings about missing hosts, except machines of the swarm, which the check `nodes` reports."""
    known_hosts = {cluster_checks.get_host_name(node) for node in snapshot.nodes} if snapshot else set()
    findings = [
        Finding(f"host {node.host}", f"is {node.missing_reason}", node.missing_hint, why=f"{node.name} cannot start on it", host=node.host)
        for node in plan.missing_nodes
        if node.host not in known_hosts
    ]
    return CheckResult("hosts", "the hosts that the config lists exist and can be reached", tuple(findings))


def _examine_nodes(
    run_probes: Callable[..., probe_results.ProbeResults],
    plan: Plan,
    snapshot: cluster_checks.ClusterSnapshot,
    check_results: list[CheckResult],
    report_progress: ProgressReporter,
) -> DoctorReport:
    """Probe the available nodes of `plan` by `run_probes`, and return the report on all checks.

    Nodes that do not start are excluded, and reported.
    """
    reserve_gpus = not capacity_checks.needs_reserved_gpus(snapshot)
    refusals: list[Finding] = []
    results = None
    while results is None and plan.available_nodes:
        try:
            results = run_probes(plan, reserve_gpus=reserve_gpus)
        except NodesRefused as error:
            why = "the job's own container would not start there either"
            refusals += [Finding(f"node {host}", reason, hint, why=why, host=host) for host, (reason, hint) in error.reasons.items()]
            if not error.reasons.keys() & {node.host for node in plan.available_nodes}:
                raise
            plan = plan.exclude_hosts(error.reasons)
        except StackError as error:
            refusals.append(Finding(error.place or "stack", error.message, error.hint, why="the job's own services would not start either"))
            break
    check_results = [*check_results, CheckResult("start", "the job's services can be started", tuple(refusals))]
    if results is None:
        return _build_report(plan, check_results)
    results = replace(
        results,
        image=snapshot.image.reference if snapshot.image else "",
        machine_addresses={cluster_checks.get_host_name(node): cluster_checks.get_machine_address(node) for node in snapshot.nodes},
        swarm_subnets=snapshot.swarm_subnets,
    )
    _store_results(snapshot, results, report_progress)
    return _build_report(plan, [*check_results, *_run_checks(probe_results.CHECKS, results)], results)


def _store_results(
    snapshot: cluster_checks.ClusterSnapshot, results: probe_results.ProbeResults, report_progress: ProgressReporter
) -> None:
    """Store the GPUs and the measured times of the probed machines in the swarm, for later plans. If that fails, report it."""
    gpus_by_node_id = {
        node["ID"]: gpus for node, planned in snapshot.planned_nodes if (gpus := gpu_checks.list_probed_gpus(results, planned)) is not None
    }
    try:
        record_gpus(DockerEngine(), gpus_by_node_id)
        if not results.failure_reason:
            record_measurement(DockerEngine(), build_measurement(results))
    except EngineError as error:
        report_progress(f"what the probe has found is not stored for later plans: {error}")


def _build_report(plan: Plan, check_results: list[CheckResult], results: probe_results.ProbeResults | None = None) -> DoctorReport:
    """Return the report. If enough nodes of `plan` are left, a problem of one host is not fatal."""
    if plan.can_form_world:
        check_results = [
            replace(result, findings=tuple(replace(finding, fatal=finding.fatal and not finding.host) for finding in result.findings))
            for result in check_results
        ]
    return DoctorReport(tuple(check_results), results)


def _run_checks(checks: CheckRegistry[EvidenceT], evidence: EvidenceT) -> Iterator[CheckResult]:
    for check in checks.checks:
        yield CheckResult(check.name, check.expectation, tuple(check.run_check(evidence)))
