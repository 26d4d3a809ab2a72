"""What the doctor found: findings by check, and the links as a matrix. It prints itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.doctor.probed import Probed, bits
from swarmtrain.launchers.base import Finding


@dataclass(frozen=True)
class Answer:
    """A check's name, what holds if it found nothing, and what it found."""

    check: str
    asks: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if not self.findings:
            return f"ok    {self.check:10} {self.asks}"
        return "\n".join(f"{_mark(finding)} {self.check:10} {_told(finding)}" for finding in self.findings)


@dataclass(frozen=True)
class Report:
    """All answers, and what the probes measured if there were any."""

    answers: tuple[Answer, ...]
    probed: Probed | None = None

    @property
    def fatal(self) -> int:
        """How many findings keep a run from working."""
        return sum(finding.fatal for answer in self.answers for finding in answer.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs."""
        measured = self.probed
        return {
            "sound": not self.fatal,
            "checks": [
                {"check": each.check, "asks": each.asks, "findings": [asdict(one) for one in each.findings]} for each in self.answers
            ],
            "nodes": dict(measured.nodes) if measured else {},
            "links": list(measured.links) if measured else [],
            "together": dict(measured.together) if measured else {},
        }

    def __str__(self) -> str:
        return "\n".join([*map(str, self.answers), *(_measured(self.probed) if self.probed else []), self._sum()])

    def _sum(self) -> str:
        found = [finding for answer in self.answers for finding in answer.findings]
        if not found:
            return f"{len(self.answers)} checks, nothing found"
        others = len(found) - self.fatal
        return f"{len(self.answers)} checks: {self.fatal} to mend before a run can work, {others} to know of"


def _mark(finding: Finding) -> str:
    return "ERROR" if finding.fatal else "warn "


def _told(finding: Finding) -> str:
    lines = [f"{finding.place}: {finding.message}"]
    lines += [f"why: {finding.why}"] * bool(finding.why)
    lines += [f"mend: {finding.hint}"] * bool(finding.hint)
    return f"\n{' ' * 17}".join(lines)


def _measured(probed: Probed) -> Iterator[str]:
    if probed.image:
        yield f"\nimage {probed.image} on {len(probed.nodes)} of {len(probed.plan.nodes)} nodes"
    yield from _nodes(probed)
    yield from _matrix(probed)
    for backend in ("gloo", "nccl"):
        took = [facts[backend] for facts in probed.together.values() if backend in facts]
        if took:
            slowest = max(took, key=lambda one: float(one["seconds"]))
            size, seconds = slowest["bytes"] / (1 << 20), slowest["seconds"]
            yield f"\nall-reduce of {size:g} MiB on {len(took)} nodes by {backend}: {seconds * 1e3:.1f} ms"


def _nodes(probed: Probed) -> Iterator[str]:
    chosen = any(facts.get("chosen") for facts in probed.nodes.values())
    yield f"\nthe nodes, by the interface that {'the config chooses' if chosen else 'leads to the notice board'}:"
    rows = [("", "host", "address", "interface", "packets", "clock", "cores", "memory", "GPUs")]
    for node in probed.plan.nodes:
        if facts := probed.nodes.get(node.name):
            interface, clock = facts["interface"], f"{facts['clock']:+.2f} s"
            packets, memory = str(facts["interfaces"].get(interface, "?")), f"{facts['memory'] / (1 << 30):.1f} GiB"
            devices = str(probed.together.get(node.name, {}).get("devices", "?"))
            rows.append((node.name, node.host, facts["address"], interface, packets, clock, str(facts["cores"]), memory, devices))
        else:
            rows.append((node.name, node.host, "?", "?", "?", "?", "?", "?", "?"))
    yield from _table(rows)


def _matrix(probed: Probed) -> Iterator[str]:
    names = [node.name for node in probed.plan.nodes]
    if len(names) < 2:
        return
    cells = {pair: text for link in probed.links for pair, text in _cells(link)}
    yield "\nbandwidth from the node on the left, and round trip:"
    yield from _table([("", *names), *((a, *(cells.get((a, b), "-" if a == b else "?") for b in names)) for a in names)])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    for row in rows:
        yield "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(link: Any) -> Iterator[tuple[tuple[str, str], str]]:
    for ends, rate in (((link["a"], link["b"]), link["there"]), ((link["b"], link["a"]), link["back"])):
        yield ends, "no" if link["error"] else f"{bits(rate)} {link['round_trip'] * 1e3:.2f} ms"
