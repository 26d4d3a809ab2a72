"""doctor: find problems that prevent a job from running on this cluster or slow it down. Cheap checks run before a probe on the nodes.

check_registry     registers the checks
cluster_checks     checks on the swarm, as its managers report it
capacity_checks    checks on the machines that the plan uses
probe              runs a probe on every node
probe_results      the results of the probes
node_checks        checks on the nodes
gpu_checks         checks on the nodes' GPUs
link_checks        checks on the network links between the nodes
report             the results of all checks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swarmtrain.doctor import (  # importing a module registers its checks
    capacity_checks,
    cluster_checks,
    gpu_checks,  # noqa: F401
    link_checks,  # noqa: F401
    node_checks,  # noqa: F401
    probe_results,
)
from swarmtrain.doctor.check_registry import CheckRegistry, EvidenceT
from swarmtrain.doctor.probe import run_probe
from swarmtrain.doctor.report import CheckResult, DoctorReport
from swarmtrain.errors import StackError
from swarmtrain.launchers.base import Finding, Launcher, ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.plan import Plan


def examine_cluster(report_progress: ProgressReporter) -> DoctorReport:
    """Check the swarm without a plan, by querying its managers, and return the report. Raises EngineError if no manager responds."""
    report_progress("querying the managers")
    return DoctorReport(tuple(_run_checks(cluster_checks.CHECKS, cluster_checks.inspect_cluster(DockerEngine(), None))))


def examine_plan(launcher: Launcher, plan: Plan, report_progress: ProgressReporter, *, probe: bool = True) -> DoctorReport:
    """Run all checks for `plan` and return the report. A swarm's nodes are probed only if the cheaper checks have no fatal finding.

    The probe is a separate run, which is removed after a few seconds. Raises SwarmtrainError.
    """
    check_results: list[CheckResult] = []
    snapshot = None
    if plan.config.runner.capabilities.has_managers:
        report_progress("querying the managers")
        snapshot = cluster_checks.inspect_cluster(DockerEngine(), plan)
        check_results += _run_checks(cluster_checks.CHECKS, snapshot)
    check_results.append(CheckResult("plan", "the plan can be deployed", tuple(launcher.check_plan(plan))))
    report = DoctorReport(tuple(check_results))
    if report.fatal_count or snapshot is None or not probe:
        return report
    try:
        results = run_probe(launcher, plan, report_progress, reserve_gpus=not capacity_checks.needs_to_wait_for_gpus(snapshot))
    except StackError as error:
        finding = Finding(error.place or "stack", error.message, error.hint, why="the job's own services would not start either")
        return DoctorReport((*check_results, CheckResult("start", "the job's services can be started", (finding,))))
    results = replace(results, image=snapshot.image.reference if snapshot.image else "")
    return DoctorReport((*check_results, *_run_checks(probe_results.CHECKS, results)), results)


def _run_checks(checks: CheckRegistry[EvidenceT], evidence: EvidenceT) -> Iterator[CheckResult]:
    for check in checks.checks:
        yield CheckResult(check.name, check.expectation, tuple(check.run_check(evidence)))
