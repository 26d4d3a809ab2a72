"""Estimates of the time per step: formulas, and the choice among what doctor has measured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.planning.inventory import build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.planning.step_estimates import (
    AllReduceTime,
    ClusterMeasurement,
    ModelStepTimes,
    RankStepTime,
    StepEstimate,
    StepEstimates,
    compute_step_digest,
    estimate_steps,
    parse_measurement,
)
from swarmtrain.view.estimates.step_time import build_estimate_records, format_estimates

ARCHITECTURE = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 64}
PARAMETERS = 1_000_000
LOW_RANK_VALUES = 50_000
RATE = 10e6
"""Bytes per second: with two nodes, an all-reduce of 4 MB takes 0.4 s."""


def build_run(hosts: int = 2, slots: int = 1, **sections: Any) -> Plan:
    entries = [f"host{number} slots={slots}" for number in range(hosts)]
    values: dict[str, Any] = {
        "runner": {"hosts": entries, "script": "training_code.py"},
        "transformer_architecture": ARCHITECTURE,
        "topology": {"global_batch_size": 16, "micro_batch_size": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    config = Config.from_json(json.dumps(values))
    inventory = build_offline_inventory(config.runner.host_entries)
    return build_plan(config, inventory, Cargo(()), run="r")


def measure(plan: Plan, *, at: float = 1000.0, on_gpus: bool = False, speeds: tuple[float, ...] = (0.1, 0.1, 0.1)) -> ClusterMeasurement:
    hosts = tuple(node.host for node in plan.nodes)
    times = {host: RankStepTime(seconds, 0.05) for host, seconds in zip(hosts, speeds, strict=False)}
    steps = ModelStepTimes(compute_step_digest(plan.config), PARAMETERS, LOW_RANK_VALUES, times)
    all_reduce = AllReduceTime(len(hosts), 0.0, RATE, on_gpus) if len(hosts) > 1 else None
    links = {(hosts[0], hosts[1]): 2 * RATE} if len(hosts) > 1 else {}
    return ClusterMeasurement(at, hosts, all_reduce, links, steps)


def estimate(plan: Plan, **options: Any) -> dict[str, float]:
    return {row.name: row.seconds for row in estimate_steps(plan, [measure(plan, **options)]).rows}


def test_the_formulas() -> None:
    """Eight micro batches on two ranks: 4 × 0.1 s + 0.05 s, and all-reduces of 8 MB (0.8 s), 4 MB, 2 MB, and 0.2 MB (PowerSGD).

    DiLoCo sends 1.016 MB in 100 steps over a link of 10 MB/s.
    """
    plan = build_run()
    compressed = {"bf16": 0.45 + 0.2, "powersgd": 0.45 + 0.02, "diloco": 0.45 + 0.1015625 / 100}
    assert estimate(plan) == pytest.approx({"ddp": 0.45 + 0.8, "zero": 0.45 + 0.6, "fsdp": 0.45 + 4 * 0.8, "one node": 0.85, **compressed})
    assert estimate_steps(plan, [measure(plan)]).exact_sum_seconds == pytest.approx(0.4)
    small = build_run(topology={"global_batch_size": 4})
    assert estimate(small)["ddp"] == pytest.approx(0.15 + 0.4), "a sum of two gradients needs no float64"
    half = build_run(transformer_architecture={"precision": "bfloat16"})
    assert estimate(half) == pytest.approx({"ddp": 0.45 + 0.4, "zero": 0.45 + 0.3, "fsdp": 0.45 + 4 * 0.4, "one node": 0.85, **compressed})
    assert estimate_steps(half, [measure(half)]).exact_sum_seconds == 0.0


def test_the_slowest_rank_decides_and_the_fastest_node_is_the_one_that_is_left() -> None:
    estimates = estimate(build_run(), speeds=(0.1, 0.3))
    assert estimates["ddp"] == pytest.approx(4 * 0.3 + 0.05 + 0.8)
    assert estimates["one node"] == pytest.approx(0.85)


def test_more_ranks_on_a_node_compute_less_and_send_more() -> None:
    """A ring of four ranks sends 2 × 3/4 of the bytes over the link of each node, a ring of two ranks 2 × 1/2.

    With a learner on each node, both of its ranks send all of its bytes.
    """
    others = {"powersgd": 0.25 + 1.5 * 0.02, "diloco": 0.25 + 2 * 0.1015625 / 100}
    exact = {"ddp": 0.25 + 1.5 * 0.8, "zero": 0.25 + 1.5 * 0.6, "fsdp": 0.25 + 2 * 1.5 * 0.8, "one node": 0.45}
    assert estimate(build_run(slots=2)) == pytest.approx({**exact, "bf16": 0.25 + 1.5 * 0.2, **others})


def test_gpus_hide_communication_behind_the_last_backward_pass() -> None:
    assert estimate(build_run(), on_gpus=True)["ddp"] == pytest.approx(0.45 + 0.8 - 2 / 3 * 0.1)
    assert estimate(build_run(transformer_architecture={"precision": "bfloat16"}), on_gpus=True, speeds=(1.0, 1.0))["ddp"] == pytest.approx(
        4.05
    )


def test_one_node_needs_no_links() -> None:
    assert estimate(build_run(hosts=1)) == pytest.approx(dict.fromkeys(["ddp", "zero", "fsdp", "bf16", "powersgd"], 0.85))


def test_the_configured_way_comes_first_and_a_clearly_faster_one_is_recommended() -> None:
    for sections, name in (
        ({}, "ddp"),
        ({"optimizer": {"zero": True}}, "zero"),
        ({"topology": {"data_parallel_type": "fsdp"}}, "fsdp"),
        ({"topology": {"data_parallel_type": "hsdp", "data_parallel_shard_size": 1}}, "hsdp"),
        ({"topology": {"gradient_compression": "bf16"}}, "bf16"),
    ):
        plan = build_run(**sections)
        estimates = estimate_steps(plan, [measure(plan)])
        assert estimates.rows[0].name == name
        assert not estimates.rows[0].settings
        assert all(row.settings for row in estimates.rows[1:])
        *exact, best = estimates.recommended
        assert (best.name, best.is_exact, best.settings["topology.learners"]) == ("diloco", False, 2)
        assert all(row.is_exact for row in exact)
        assert [row.name for row in exact] == ([] if name == "bf16" else ["one node"])
    fast = build_run()
    assert estimate_steps(fast, [measure(fast, speeds=(9.0, 9.0))]).recommended == (), "zero would save 1 %"


def test_the_rounds_of_learners() -> None:
    """Four learners on two nodes send 2 × 4 MB in 20 steps over 10 MB/s; two fragments wait for what the overlap of 1 step leaves."""
    diloco: dict[str, Any] = {"inner_steps": 20}
    learners = build_run(topology={"learners": 4}, diloco=diloco)
    assert estimate(learners)["diloco"] == pytest.approx(0.45 + 0.8 / 20)
    overlapping = build_run(topology={"learners": 4}, diloco={**diloco, "fragments": 2, "overlap": 1})
    assert estimate(overlapping)["diloco"] == pytest.approx(0.45, abs=1e-9), "0.4 s per fragment, less than a step"
    spanning = build_run(topology={"learners": 1}, diloco=diloco)
    assert estimate(spanning)["diloco"] == pytest.approx(0.45 + 0.8), "both nodes train the same learner"
    assert "diloco" not in estimate(build_run(hosts=3, topology={"global_batch_size": 16}), speeds=(0.1, 0.1, 0.1)), "8 for 3 learners"
    rows = estimate_steps(learners, [measure(learners)]).rows
    assert [row.name for row in rows] == ["diloco", "ddp", "zero", "fsdp", "bf16", "powersgd", "one node"]
    assert dict(rows[1].settings) == {"diloco": {}, "topology.learners": None}
    assert not rows[-1].is_exact


def test_the_settings_of_a_recommendation_are_valid_overrides(tmp_path: Path) -> None:
    """Those that remove learners also have to remove the section diloco."""
    (tmp_path / "run.yml").write_text(build_run(topology={"learners": 2}, diloco={"inner_steps": 20}).config.to_json())
    (line,) = [
        each
        for each in format_estimates(
            StepEstimates(
                rows=(
                    StepEstimate("diloco", 2.0, 1.0, {}, is_exact=False),
                    StepEstimate("ddp", 1.0, 0.5, {"diloco": {}, "topology.learners": None}),
                )
            )
        )
        if "faster" in each
    ]
    overrides = shlex.split(line.partition(":")[2])[1::2]
    assert load_config(tmp_path / "run.yml", overrides).topology.learners is None


def test_the_newest_measurement_that_has_what_is_needed_is_used() -> None:
    plan, other = build_run(), build_run(transformer_architecture={"num_layers": 3})
    old, new = measure(plan, at=1.0), measure(other, at=2.0)
    assert estimate_steps(plan, [old, new]).step_times_at == 1.0
    assert estimate_steps(plan, [old, new]).links_at == 2.0, "the links do not depend on the model"
    assert "step times of this model" in estimate_steps(plan, [new]).missing_reason
    assert "step times" in estimate_steps(build_run(hosts=3), [old]).missing_reason
    assert "step times" in estimate_steps(plan, []).missing_reason
    lone = measure(build_run(hosts=1), at=3.0)
    without_links = ClusterMeasurement(3.0, old.hosts, None, {}, old.step_times)
    assert "links" in estimate_steps(plan, [lone, without_links]).missing_reason


def test_what_is_not_measured_is_explained() -> None:
    sharded = build_run(hosts=4, topology={"model_parallel_size": 2})
    assert "replicas of several ranks" in estimate_steps(sharded, [measure(sharded)]).missing_reason


def test_measurements_survive_storage_and_a_malformed_one_is_an_error() -> None:
    measurement = measure(build_run())
    assert parse_measurement(json.loads(json.dumps(measurement.to_dict()))) == measurement
    for change in ({"hosts": None}, {"links": [[0, 9, 1.0]]}, {"all_reduce": {"rate": 1}}, {"step_times": {"digest": 1}}):
        with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
            parse_measurement({**measurement.to_dict(), **change})


def test_the_lines_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.estimates.step_time.time.time", lambda: 1120.0)
    plan = build_run()
    estimates = estimate_steps(plan, [measure(plan)])
    assert list(format_estimates(estimates)) == [
        "time per step, estimated from what doctor measured 2 min 00 s ago:",
        "  ddp       1.25 s, of which 800 ms network (400 ms of it for exact sums); as configured",
        "  zero      1.05 s, of which 600 ms network",
        "  fsdp      3.65 s, of which 3.2 s network",
        "  bf16      650 ms, of which 200 ms network; not exact",
        "  powersgd  470 ms, of which 20 ms network; not exact",
        "  diloco    451 ms, of which 1.02 ms network; not exact",
        "  one node  850 ms",
        "  one node would be faster: -o runner.nodes=1",
        "  diloco would be faster, with other losses: -o topology.learners=2 -o diloco.quantization=int8",
    ]
    assert list(format_estimates(StepEstimates(missing_reason="because"))) == []
    records = build_estimate_records(estimates)
    assert records["recommended"] == ["one node", "diloco"]
    assert json.loads(json.dumps(records)) == records
