"""Report of the doctor: findings by check, and the links as a matrix. The objects format themselves as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.doctor.probe_results import ProbeResults, find_all_reduce_timings, format_bandwidth
from swarmtrain.launchers.base import CheckResult, Finding


@dataclass(frozen=True)
class DoctorReport:
    """Report of the doctor: the results of all checks, and the probe's measurements if there was a probe."""

    check_results: tuple[CheckResult, ...]
    probe_results: ProbeResults | None = None

    @property
    def fatal_count(self) -> int:
        """Number of findings that prevent a run from working."""
        return sum(finding.fatal for check_result in self.check_results for finding in check_result.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict, for `--json`."""
        results = self.probe_results
        return {
            "ok": not self.fatal_count,
            "checks": [
                {"check": result.check, "expectation": result.expectation, "findings": [asdict(finding) for finding in result.findings]}
                for result in self.check_results
            ],
            "nodes": dict(results.nodes) if results else {},
            "links": list(results.links) if results else [],
            "collective": dict(results.collective_results) if results else {},
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                *map(format_check_result, self.check_results),
                *(_format_measurements(self.probe_results) if self.probe_results else []),
                self._format_summary(),
            ]
        )

    def _format_summary(self) -> str:
        findings = [finding for check_result in self.check_results for finding in check_result.findings]
        if not findings:
            return f"{len(self.check_results)} checks, no problems found"
        warning_count = len(findings) - self.fatal_count
        return f"{len(self.check_results)} checks: {self.fatal_count} fatal, {warning_count} warnings"


def format_check_result(result: CheckResult) -> str:
    """Return the findings of a check as text, or its expectation if there are none."""
    if not result.findings:
        return f"ok    {result.check:10} {result.expectation}"
    return "\n".join(f"{_format_severity(finding)} {result.check:10} {_format_finding(finding)}" for finding in result.findings)


def _format_severity(finding: Finding) -> str:
    return "ERROR" if finding.fatal else "warn "


def _format_finding(finding: Finding) -> str:
    lines = [f"{finding.place}: {finding.message}"]
    lines += [f"why: {finding.why}"] * bool(finding.why)
    lines += [f"fix: {finding.hint}"] * bool(finding.hint)
    return f"\n{' ' * 17}".join(lines)


def _format_measurements(results: ProbeResults) -> Iterator[str]:
    if results.image:
        yield f"\nimage {results.image} on {len(results.nodes)} of {len(results.plan.nodes)} nodes"
    yield from _format_nodes(results)
    yield from _format_link_matrix(results)
    for backend in ("gloo", "nccl"):
        if timings := find_all_reduce_timings(results, backend):
            sizes = {timings[f"{prefix}bytes"] / (1 << 20): timings[f"{prefix}seconds"] * 1e3 for prefix in ("", "large_")}
            text = ", ".join(f"of {size:g} MiB {milliseconds:.1f} ms" for size, milliseconds in sizes.items())
            yield f"\nall-reduce by {backend} on {len(results.collective_results)} nodes: {text}"
    yield from _format_step_times(results)


def _format_step_times(results: ProbeResults) -> Iterator[str]:
    if results.step_times:
        yield "\ntraining steps of one rank, while all ranks of its node train, without communication:"
        rows = [("", "micro batch", "rest of a step")]
        for name, times in sorted(results.step_times.items()):
            if "error" in times:
                rows.append((name, str(times["error"]), ""))
            else:
                rows.append((name, f"{times['micro_batch_seconds']:.3g} s", f"{times['step_seconds']:.3g} s"))
        yield from _format_table(rows)


def _format_nodes(results: ProbeResults) -> Iterator[str]:
    is_configured = any(facts.get("is_configured") for facts in results.nodes.values())
    yield f"\nthe nodes, with the interface that {'the config selects' if is_configured else 'is the route to the coordinator'}:"
    rows = [("", "host", "address", "interface", "packets", "clock", "cores", "memory", "GPUs")]
    for node in results.plan.nodes:
        if facts := results.nodes.get(node.name):
            interface, clock = facts["interface"], f"{facts['clock']:+.2f} s"
            packets, memory = str(facts["interfaces"].get(interface, "?")), f"{facts['memory'] / (1 << 30):.1f} GiB"
            devices = str(results.collective_results.get(node.name, {}).get("devices", "?"))
            rows.append((node.name, node.host, facts["address"], interface, packets, clock, str(facts["cores"]), memory, devices))
        else:
            rows.append((node.name, node.host, "?", "?", "?", "?", "?", "?", "?"))
    yield from _format_table(rows)


def _format_link_matrix(results: ProbeResults) -> Iterator[str]:
    names = [node.name for node in results.plan.nodes]
    if len(names) < 2:
        return
    cells = {pair: text for link in results.links for pair, text in _format_link_cells(link)}
    yield "\nbandwidth from the node on the left, and round-trip time:"
    yield from _format_table([("", *names), *((a, *(cells.get((a, b), "-" if a == b else "?") for b in names)) for a in names)])


def _format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    for row in rows:
        yield "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _format_link_cells(link: Any) -> Iterator[tuple[tuple[str, str], str]]:
    for node_pair, rate in (((link["a"], link["b"]), link["forward_bandwidth"]), ((link["b"], link["a"]), link["backward_bandwidth"])):
        yield node_pair, "no" if link["error"] else f"{format_bandwidth(rate)} {link['round_trip'] * 1e3:.2f} ms"
