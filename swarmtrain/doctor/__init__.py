"""doctor: find problems that prevent a job from running on this cluster or slow it down. Cheap checks run before a probe on the nodes.

The launcher checks the cluster itself, through the port ClusterInspector.

probe              runs a probe on every node
probe_results      the results of the probes, and what they measured for the estimates of later plans
node_checks        checks on the nodes
gpu_checks         checks on the nodes' GPUs
link_checks        checks on the network links between the nodes
subnet_check       check of the overlay network's subnet
report             the results of all checks
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from swarmtrain.doctor import (  # importing a module registers its checks
    gpu_checks,
    link_checks,  # noqa: F401
    node_checks,  # noqa: F401
    probe_results,
    subnet_check,  # noqa: F401
)
from swarmtrain.doctor.probe import run_probe
from swarmtrain.doctor.probe_results import build_measurement
from swarmtrain.doctor.report import DoctorReport
from swarmtrain.errors import EngineError, NodesRefused, PlanError, StackError
from swarmtrain.launchers.base import (
    CheckResult,
    ClusterInspector,
    ClusterReport,
    Finding,
    Launcher,
    ProgressReporter,
    exclude_unusable_hosts,
)
from swarmtrain.planning.plan import Plan
from swarmtrain.queueing.request_checks import check_queue_request

_PLAN_EXPECTATION = "the plan can be deployed"


def examine_cluster(launcher: Launcher, report_progress: ProgressReporter) -> DoctorReport:
    """Check the launcher's cluster without a plan, by querying its managers, and return the report.

    The report is empty if the launcher has no such cluster. Raises EngineError if no manager responds.
    """
    if not isinstance(launcher, ClusterInspector):
        return DoctorReport(())
    report_progress("querying the managers")
    return DoctorReport(launcher.inspect_cluster(None).check_results)


def examine_cluster_without_plan(launcher: Launcher, error: PlanError, report_progress: ProgressReporter) -> DoctorReport:
    """Return the report for a config for which no plan can be made: the plan's `error`, and the checks of the launcher's cluster.

    Raises EngineError if no manager of the cluster responds.
    """
    report = examine_cluster(launcher, report_progress)
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
    cluster = None
    if isinstance(launcher, ClusterInspector):
        report_progress("querying the managers")
        cluster = launcher.inspect_cluster(plan)
        check_results += cluster.check_results
    check_results.append(_check_hosts(plan, cluster.machine_addresses if cluster else {}))
    check_results.append(CheckResult("plan", _PLAN_EXPECTATION, (*launcher.check_plan(plan), *check_queue_request(launcher, plan))))
    findings = [finding for check_result in check_results for finding in check_result.findings]
    usable_plan = exclude_unusable_hosts(plan, findings)
    is_blocked = any(finding.fatal and not finding.host for finding in findings)
    if is_blocked or cluster is None or not probe or not usable_plan.available_nodes:
        return _build_report(usable_plan, check_results)
    run_probes = partial(run_probe, launcher, report_progress=report_progress, step_time_seconds=step_time_seconds)
    report = _examine_nodes(run_probes, usable_plan, cluster, check_results)
    if report.probe_results is not None and isinstance(launcher, ClusterInspector):
        _store_results(launcher, cluster, report.probe_results, report_progress)
    return report


def _check_hosts(plan: Plan, cluster_hosts: Collection[str]) -> CheckResult:
    """Return the findings about missing hosts, except machines of the cluster, which its own checks report."""
    findings = [
        Finding(f"host {node.host}", f"is {node.missing_reason}", node.missing_hint, why=f"{node.name} cannot start on it", host=node.host)
        for node in plan.missing_nodes
        if node.host not in cluster_hosts
    ]
    return CheckResult("hosts", "the hosts that the config lists exist and can be reached", tuple(findings))


def _examine_nodes(
    run_probes: Callable[..., probe_results.ProbeResults],
    plan: Plan,
    cluster: ClusterReport,
    check_results: list[CheckResult],
) -> DoctorReport:
    """Probe the available nodes of `plan` by `run_probes`, and return the report on all checks.

    Nodes that do not start are excluded, and reported.
    """
    refusals: list[Finding] = []
    results = None
    while results is None and plan.available_nodes:
        try:
            results = run_probes(plan, reserve_gpus=not cluster.lacks_free_gpus)
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
        image=cluster.image,
        machine_addresses=cluster.machine_addresses,
        swarm_subnets=cluster.subnets,
    )
    return _build_report(plan, [*check_results, *probe_results.CHECKS.run_checks(results)], results)


def _store_results(
    inspector: ClusterInspector, cluster: ClusterReport, results: probe_results.ProbeResults, report_progress: ProgressReporter
) -> None:
    """Store the GPUs and the measured times of the probed machines in the cluster, for later plans. If that fails, report it."""
    gpus_by_node_id = {
        cluster.node_ids[node.name]: gpus
        for node in results.plan.nodes
        if node.name in cluster.node_ids and (gpus := gpu_checks.list_probed_gpus(results, node)) is not None
    }
    try:
        inspector.record_probe(gpus_by_node_id, None if results.failure_reason else build_measurement(results))
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
