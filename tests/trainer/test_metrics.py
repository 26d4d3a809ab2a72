"""What a run reports: events, metrics.jsonl, log lines, W&B, the profiler's trace."""

from __future__ import annotations

import json
import math
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from coordinator_thread import serve_coordinator
from worlds import LocalWorld, list_saved_steps, merge_config, read_audit, read_validation_losses, run_training

from swarmtrain import protocol
from swarmtrain.protocol import Event
from swarmtrain.trainer.metrics.event_sender import EventSender
from swarmtrain.trainer.metrics.reduction import MetricValue, ReductionOp, reduce_metrics
from swarmtrain.trainer.metrics.sinks.jsonl import MetricsFile, append_missing_step_metrics
from swarmtrain.trainer.metrics.throughput import Throughput

KEY = "0123456789abcdef0123456789abcdef01234567"


def filter_events(published: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in published if event.kind == kind]


def test_a_run_reports_to_the_coordinator(
    tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]
) -> None:
    environ = {"SWARMTRAIN_COORDINATOR": coordinator_address, "SWARMTRAIN_NODE": "node0"}
    saving = merge_config(config, trainer={"save_interval": 4, "eval_interval": 6})
    run_training(tmp_path, merge_config(saving, trainer={"train_iterations": 9}), 2, environ)
    assert [event["step"] for event in filter_events(published_events, protocol.EVENT_CHECKPOINT)] == [4, 8, 9]
    assert [event["step"] for event in filter_events(published_events, protocol.EVENT_EVALUATION)] == [0, 6, 9]
    published_events.clear()
    (tmp_path / "run" / "step-00000009" / "manifest.json").unlink()
    measured = run_training(tmp_path, saving, 2, environ)
    assert [event["step"] for event in filter_events(published_events, protocol.EVENT_RESUMED)] == [8]
    assert "step-00000009" in filter_events(published_events, protocol.EVENT_NOTE)[0]["message"]
    (last,) = filter_events(published_events, protocol.EVENT_TRAINING_FINISHED)
    assert last["step"] == 12
    assert (last["initial_validation_loss"], last["final_validation_loss"]) == (
        read_validation_losses(tmp_path)[0],
        read_validation_losses(tmp_path)[12],
    )
    for event in filter_events(published_events, protocol.EVENT_PROGRESS):
        assert {"step", "steps", "loss", "tokens_per_second", "eta_seconds", "learning_rate"} <= event.keys()
        assert event["loss"] == measured[event["step"]]


def test_progress_reaches_the_coordinator_while_training(
    tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]
) -> None:
    """Steps are as small as possible: even on a busy machine, many run between two progress events."""
    endless = merge_config(
        config, trainer={"train_iterations": 1_000_000, "save_dir": None}, topology={"global_batch_size": 2, "micro_batch_size": 1}
    )
    world = LocalWorld(
        tmp_path, merge_config(endless, transformer_architecture={"num_layers": 1}), 2, {"SWARMTRAIN_COORDINATOR": coordinator_address}
    )
    begun = time.monotonic()
    world.wait_until(
        lambda: (
            len(filter_events(published_events, protocol.EVENT_PROGRESS)) >= 4
            and len(read_audit(tmp_path)) > 2 * 4 * (1 + time.monotonic() - begun)
        )
    )
    seconds, steps = time.monotonic() - begun, max(line["step"] for line in read_audit(tmp_path))
    world.send_signal(0, signal.SIGTERM)
    world.wait()
    assert len(filter_events(published_events, protocol.EVENT_PROGRESS)) <= 2 + 2 * seconds < steps, "about two a second, not one a step"


@pytest.mark.test_all_only("waits until a coordinator that does not answer is given up")
def test_no_coordinator_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    assert len(run_training(tmp_path, config, 1, {"SWARMTRAIN_COORDINATOR": address})) == 12


def test_events_outlive_an_unreachable_coordinator(published_events: list[Event]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    poster = EventSender(f"127.0.0.1:{port}")
    for step in range(3):
        poster.queue_progress_event(Event(protocol.EVENT_PROGRESS, {"step": step}))
        poster.queue_event(Event(protocol.EVENT_CHECKPOINT, {"step": step}))
        time.sleep(0.2)
    with serve_coordinator(port=port, events=published_events):
        poster.close(10)
    assert [event["step"] for event in filter_events(published_events, protocol.EVENT_CHECKPOINT)] == [0, 1, 2]
    assert [event["step"] for event in filter_events(published_events, protocol.EVENT_PROGRESS)] in ([], [2]), (
        "old progress is nobody's business"
    )


def test_a_line_of_metrics_has_the_phases_of_a_step(tmp_path: Path, config: dict[str, Any]) -> None:
    config_data = merge_config(
        config, trainer={"save_interval": 4, "eval_interval": 6}, logger={"log_interval": 3}, optimizer={"gradient_clipping": 1e-3}
    )
    run_training(tmp_path, config_data, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    parts = {"data", "forward", "backward", "communication", "optimizer", "checkpoint", "logging", "other"}
    for step, line in steps.items():
        seconds = {name: value for name, value in line.items() if name.endswith("_seconds") and name != "step_seconds"}
        absent = {"logging_seconds"} | ({"checkpoint_seconds"} if step == 1 else set())  # no step was to be saved before the first
        assert {f"{part}_seconds" for part in parts} - absent <= seconds.keys()
        assert sum(seconds.values()) == pytest.approx(line["step_seconds"], abs=1e-4)
        assert min(seconds.values()) >= 0
        assert line["loss"] < line["max_replica_loss"] < 2 * line["loss"]
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 2, rel=1e-3)
        assert line["clipped"]
        assert ("memory_host" in line) == (line["step"] % 3 == 0)
    assert {step for step, line in steps.items() if "validation_seconds" in line} == {1, 7}
    assert steps[2]["checkpoint_seconds"] < steps[5]["checkpoint_seconds"], "a checkpoint of step 4 is made before step 5"
    assert steps[12]["memory_host"] > 50 * 2**20


def test_the_metrics_file_drops_what_will_be_recomputed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 2.5}, {"step": 3, "loss": 1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    file = MetricsFile(tmp_path, resumed_step=2)
    file.write_metrics({"step": 3, "loss": 1.5})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*rows[:3], {"step": 3, "loss": 1.5}]


def test_a_fenced_worlds_metrics_are_not_visible(tmp_path: Path) -> None:
    old = MetricsFile(tmp_path, resumed_step=0)
    new = MetricsFile(tmp_path, resumed_step=0)
    new.write_metrics({"step": 1, "loss": 1.0})
    old.write_metrics({"step": 1, "loss": 9.0})
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1.0]


def test_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    speed = Throughput()
    speed.record_step(100)
    speed.record_step(300)
    assert speed.tokens_per_second == 100
    assert speed.estimate_seconds_left(10) == 20


def test_log_lines(tmp_path: Path, config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(config, logger={"log_interval": 5}), 2)
    assert world.wait() == [0, 0]
    lines = [line for line in (tmp_path / "rank-0.log").read_text().splitlines() if "tokens/s" in line]
    assert [line.split()[:2] for line in lines] == [["step", "5/12"], ["step", "10/12"], ["step", "12/12"]]
    assert all("eta 0:00:0" in line and "grad norm" in line and "lr " in line for line in lines)
    assert (tmp_path / "rank-1.log").read_text() == "", "one voice"
    assert "validation loss 4." in world.read_log().splitlines()[-1]


def build_wandb_config(config: dict[str, Any], tmp_path: Path, **options: object) -> tuple[dict[str, Any], dict[str, str]]:
    (tmp_path / "key").write_text(KEY + "\n")
    # W&B's own folders also go where the test can search them.
    environ = {name: str(tmp_path / "home") for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
    environ["SWARMTRAIN_SECRETS"] = json.dumps({"WANDB_API_KEY": str(tmp_path / "key")})
    return merge_config(config, logger={"use_wandb": True, "log_dir": "logs", **options}), environ


def find_files_with_key(tmp_path: Path) -> list[Path]:
    files = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    return [path for path in files if path != tmp_path / "key"]


def test_wandb_offline(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    offline, environ = build_wandb_config(config, tmp_path, wandb_offline=True)
    for steps in (6, 12):
        run_training(tmp_path / "job", merge_config(offline, trainer={"train_iterations": steps}), 2, environ)
    written = list((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    (name,) = {path.stem for path in written}
    assert name == "run-" + (tmp_path / "job" / "run" / "wandb-id").read_text().strip(), "the same run, taken up again"
    assert b"gradient_norm" in b"".join(path.read_bytes() for path in written)
    assert find_files_with_key(tmp_path) == []


@pytest.mark.test_all_only("waits until a service that does not answer is given up")
def test_an_unreachable_wandb_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host = f"http://127.0.0.1:{gone.getsockname()[1]}"
    online, environ = build_wandb_config(config, tmp_path, wandb_host=host)
    world = LocalWorld(tmp_path / "job", online, 1, environ)
    assert world.wait() == [0], world.read_log()
    assert "is unreachable" in world.read_log()
    assert list((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*/*.wandb")), "it goes on offline"
    assert find_files_with_key(tmp_path) == []


@pytest.mark.test_all_only("waits until a service that does not answer is given up")
def test_a_silent_wandb_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    """A service that accepts the connection and never answers must not keep the process from exiting either."""
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online, environ = build_wandb_config(config, tmp_path, wandb_host=f"http://127.0.0.1:{silent.getsockname()[1]}")
        world = LocalWorld(tmp_path / "job", online, 1, environ)
        assert world.wait() == [0], world.read_log()
    assert "wandb: disabled" in world.read_log()
    assert find_files_with_key(tmp_path) == []


def test_wandb_without_a_key_is_reported(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    world = LocalWorld(tmp_path, merge_config(config, logger={"use_wandb": True}), 1, {"HOME": str(tmp_path)})
    assert world.wait() == [1]
    assert "config logger.use_wandb: needs an API key, but this run has none" in world.read_log()


def test_a_surviving_rank_writes_the_line_that_rank_0_died_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "loss": 2.5}\n{"step": 7, "lo')
    append_missing_step_metrics(tmp_path, 7, {"loss": 2.25})
    append_missing_step_metrics(tmp_path, 7, {"loss": 2.25})
    append_missing_step_metrics(tmp_path, 9, {"loss": 2.0})
    assert MetricsFile(tmp_path, 7).path.read_text() == '{"step": 6, "loss": 2.5}\n{"step": 7, "loss": 2.25}\n'


def test_a_nan_validation_loss_neither_wins_nor_breaks_the_metrics(
    tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]
) -> None:
    """The best checkpoint, of step 2, stays; metrics and events contain null, which is valid JSON."""
    keeps = {"keep_checkpoints": 1, "keep_best_checkpoints": 1, "eval_interval": 1, "save_interval": 1, "train_iterations": 5}
    environ = {"SWARMTRAIN_COORDINATOR": coordinator_address}
    world = LocalWorld(tmp_path, merge_config(config, trainer=keeps), 1, environ, script="nan_validation")
    assert world.wait() == [0], world.read_log()
    assert list_saved_steps(tmp_path) == [2, 5]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    expected = [3.0, None, 1.0, None, 2.0, 4.0]
    assert list(read_validation_losses(tmp_path).values()) == expected
    assert [event["loss"] for event in filter_events(published_events, protocol.EVENT_EVALUATION)] == expected


@pytest.mark.parametrize("reduction", [ReductionOp.min, ReductionOp.max])
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [1, math.nan, 2]])
def test_a_metric_that_is_nan_on_any_rank_has_no_minimum(reduction: ReductionOp, values: list[float]) -> None:
    assert reduce_metrics([{"loss": MetricValue(value, reduction)} for value in values]) == {"loss": None}
