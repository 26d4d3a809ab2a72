"""What a run tells: events, metrics.jsonl, log lines, W&B, the profiler's trace."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import World, audit, changed, held_out, train

from swarmtrain import wire
from swarmtrain.entrypoint.notices import Notices
from swarmtrain.entrypoint.rendezvous import BoardServer
from swarmtrain.trainer.metrics.board import Poster
from swarmtrain.trainer.metrics.sinks.lines import MetricsFile, add_missing
from swarmtrain.trainer.metrics.speed import Speed
from swarmtrain.wire import Event

KEY = "0123456789abcdef0123456789abcdef01234567"


def of(published: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in published if event.kind == kind]


def test_a_run_tells_the_board(tmp_path: Path, config: dict[str, Any], board: str, published: list[Event]) -> None:
    environ = {"SWARMTRAIN_BOARD": board, "SWARMTRAIN_NODE": "node0"}
    saving = changed(config, trainer={"save_interval": 4, "eval_interval": 6})
    train(tmp_path, changed(saving, trainer={"train_iterations": 9}), 2, environ)
    assert [event["step"] for event in of(published, wire.CHECKPOINT)] == [4, 8, 9]
    assert [event["step"] for event in of(published, wire.EVALUATION)] == [0, 6, 9]
    published.clear()
    (tmp_path / "run" / "step-00000009" / "manifest.json").unlink()
    measured = train(tmp_path, saving, 2, environ)
    assert [event["step"] for event in of(published, wire.RESUMED)] == [8]
    assert "step-00000009" in of(published, wire.NOTE)[0]["message"]
    (last,) = of(published, wire.FINISHED)
    assert last["step"] == 12
    assert (last["loss_before"], last["loss_after"]) == (held_out(tmp_path)[0], held_out(tmp_path)[12])
    for event in of(published, wire.PROGRESS):
        assert {"step", "steps", "loss", "tokens_per_second", "eta_seconds", "learning_rate"} <= event.keys()
        assert event["loss"] == measured[event["step"]]


def test_progress_reaches_the_board_while_training(tmp_path: Path, config: dict[str, Any], board: str, published: list[Event]) -> None:
    """Steps are as small as can be: on a busy machine, too, many are made while little is told."""
    endless = changed(
        config, trainer={"train_iterations": 1_000_000, "save_dir": None}, topology={"global_batch_size": 2, "micro_batch_size": 1}
    )
    world = World(tmp_path, changed(endless, transformer_architecture={"num_layers": 1}), 2, {"SWARMTRAIN_BOARD": board})
    begun = time.monotonic()
    world.until(lambda: len(of(published, wire.PROGRESS)) >= 4 and len(audit(tmp_path)) > 2 * 4 * (1 + time.monotonic() - begun))
    seconds, steps = time.monotonic() - begun, max(line["step"] for line in audit(tmp_path))
    world.send(0, signal.SIGTERM)
    world.wait()
    assert len(of(published, wire.PROGRESS)) <= 2 + 2 * seconds < steps, "about two a second, not one a step"


@pytest.mark.test_all_only("waits until a coordinator that does not answer is given up")
def test_no_board_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    assert len(train(tmp_path, config, 1, {"SWARMTRAIN_BOARD": address})) == 12


def test_events_outlive_a_board_that_is_away(published: list[Event]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    poster = Poster(f"127.0.0.1:{port}")
    for step in range(3):
        poster.progress(Event(wire.PROGRESS, {"step": step}))
        poster.post(Event(wire.CHECKPOINT, {"step": step}))
        time.sleep(0.2)
    notices = Notices(
        run="test", max_restarts=3, max_restarts_per_hour=20, min_nodes=1, boot="b", now=time.monotonic, publish=published.append
    )
    with BoardServer(("127.0.0.1", port), notices) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        poster.close(10)
        server.shutdown()
    assert [event["step"] for event in of(published, wire.CHECKPOINT)] == [0, 1, 2]
    assert [event["step"] for event in of(published, wire.PROGRESS)] in ([], [2]), "old progress is nobody's business"


def test_a_line_of_metrics_says_where_the_time_of_a_step_goes(tmp_path: Path, config: dict[str, Any]) -> None:
    told = changed(
        config, trainer={"save_interval": 4, "eval_interval": 6}, logger={"log_interval": 3}, optimizer={"gradient_clipping": 1e-3}
    )
    train(tmp_path, told, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    parts = {"data", "forward", "backward", "communication", "optimizer", "checkpoint", "logging", "other"}
    for line in steps.values():
        seconds = {name: value for name, value in line.items() if name.endswith("_seconds") and name != "step_seconds"}
        assert {f"{part}_seconds" for part in parts} - {"logging_seconds"} <= seconds.keys()
        assert sum(seconds.values()) == pytest.approx(line["step_seconds"], abs=1e-4)
        assert min(seconds.values()) >= 0
        assert line["loss"] < line["loss_max"] < 2 * line["loss"]
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 2, rel=1e-3)
        assert line["clipped"]
        assert ("memory_host" in line) == (line["step"] % 3 == 0)
    assert {step for step, line in steps.items() if "evaluation_seconds" in line} == {1, 7}
    assert steps[2]["checkpoint_seconds"] < steps[5]["checkpoint_seconds"], "a checkpoint of step 4 is made before step 5"
    assert steps[12]["memory_host"] > 50 * 2**20


def test_metrics_file_drops_what_will_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "held_out_loss": 2.5}, {"step": 3, "loss": 1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    file = MetricsFile(tmp_path, step=2)
    file.write({"step": 3, "loss": 1.5})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*rows[:3], {"step": 3, "loss": 1.5}]


def test_a_cut_off_worlds_metrics_are_not_seen(tmp_path: Path) -> None:
    old = MetricsFile(tmp_path, step=0)
    new = MetricsFile(tmp_path, step=0)
    new.write({"step": 1, "loss": 1.0})
    old.write({"step": 1, "loss": 9.0})
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1.0]


def test_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    speed = Speed()
    speed.step(100)
    speed.step(300)
    assert speed.tokens_per_second == 100
    assert speed.eta(10) == 20


def test_log_lines(tmp_path: Path, config: dict[str, Any]) -> None:
    world = World(tmp_path, changed(config, logger={"log_interval": 5}), 2)
    assert world.wait() == [0, 0]
    lines = [line for line in (tmp_path / "rank-0.log").read_text().splitlines() if "tokens/s" in line]
    assert [line.split()[:2] for line in lines] == [["step", "5/12"], ["step", "10/12"], ["step", "12/12"]]
    assert all("eta 0:00:0" in line and "grad norm" in line and "lr " in line for line in lines)
    assert (tmp_path / "rank-1.log").read_text() == "", "one voice"
    assert "held-out loss 4." in world.log().splitlines()[-1]


def wandb_config(config: dict[str, Any], tmp_path: Path, **options: object) -> tuple[dict[str, Any], dict[str, str]]:
    (tmp_path / "key").write_text(KEY + "\n")
    # Its own folders too go where the test can look through them.
    environ = {name: str(tmp_path / "home") for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
    environ["SWARMTRAIN_SECRETS"] = json.dumps({"WANDB_API_KEY": str(tmp_path / "key")})
    return changed(config, logger={"use_wandb": True, "log_dir": "logs", **options}), environ


def files_with_the_key(tmp_path: Path) -> list[Path]:
    files = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    return [path for path in files if path != tmp_path / "key"]


def test_wandb_offline(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    offline, environ = wandb_config(config, tmp_path, wandb_offline=True)
    for steps in (6, 12):
        train(tmp_path / "job", changed(offline, trainer={"train_iterations": steps}), 2, environ)
    written = list((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    (name,) = {path.stem for path in written}
    assert name == "run-" + (tmp_path / "job" / "run" / "wandb-id").read_text().strip(), "the same run, taken up again"
    assert b"gradient_norm" in b"".join(path.read_bytes() for path in written)
    assert files_with_the_key(tmp_path) == []


@pytest.mark.test_all_only("waits until a service that does not answer is given up")
def test_wandb_away_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host = f"http://127.0.0.1:{gone.getsockname()[1]}"
    online, environ = wandb_config(config, tmp_path, wandb_host=host)
    world = World(tmp_path / "job", online, 1, environ)
    assert world.wait() == [0], world.log()
    assert "does not answer" in world.log()
    assert list((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*/*.wandb")), "it goes on offline"
    assert files_with_the_key(tmp_path) == []


@pytest.mark.test_all_only("waits until a service that does not answer is given up")
def test_wandb_silent_does_not_stop_training(tmp_path: Path, config: dict[str, Any]) -> None:
    """A service that takes the connection and never answers must not keep the process from ending either."""
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online, environ = wandb_config(config, tmp_path, wandb_host=f"http://127.0.0.1:{silent.getsockname()[1]}")
        world = World(tmp_path / "job", online, 1, environ)
        assert world.wait() == [0], world.log()
    assert "wandb: not used" in world.log()
    assert files_with_the_key(tmp_path) == []


def test_wandb_without_a_key_says_so(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("wandb")
    world = World(tmp_path, changed(config, logger={"use_wandb": True}), 1, {"HOME": str(tmp_path)})
    assert world.wait() == [1]
    assert "config logger.use_wandb: has no key" in world.log()


def test_a_survivor_writes_the_line_that_rank_0_died_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "loss": 2.5}\n{"step": 7, "lo')
    add_missing(tmp_path, 7, {"loss": 2.25})
    add_missing(tmp_path, 7, {"loss": 2.25})
    add_missing(tmp_path, 9, {"loss": 2.0})
    assert MetricsFile(tmp_path, 7).path.read_text() == '{"step": 6, "loss": 2.5}\n{"step": 7, "loss": 2.25}\n'
