"""The contract of sinks: each step once, also across a crash, except in W&B's offline files.

A full or unreachable destination never stops training.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import determined_service as of_determined
import pytest
import wandb_service
from test_metrics import KEY, build_wandb_config, find_files_with_key
from worlds import LocalWorld, merge_config

from swarmtrain.trainer.metrics.sinks import Sink
from swarmtrain.trainer.metrics.sinks.csv_table import CsvTable
from swarmtrain.trainer.metrics.sinks.jsonl import MetricsFile
from swarmtrain.trainer.metrics.sinks.metrics_lines import ResumeHistory
from swarmtrain.trainer.metrics.sinks.tensorboard import EventFile

Points = list[tuple[int, str, float]]
"""Step, name, value; duplicate points stay duplicates."""

FIRST_LINES = [{"step": step, "loss": step + 0.25} for step in range(1, 8)]
VALIDATION = {"step": 7, "validation_loss": 7.75}
LOST_LINES = [{"step": step, "loss": 0.0} for step in range(8, 11)]
RESUMED_LINES = [{"step": step, "loss": step + 0.5, "late": step} for step in range(8, 13)]
EXPECTED = [(line["step"], name, line[name]) for line in (*FIRST_LINES, VALIDATION, *RESUMED_LINES) for name in line if name != "step"]


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[tuple[Path, of_determined.DeterminedMaster]]:
    """A run that wrote 10 steps to all sinks at once, was killed, resumed after the seventh, and finished."""
    folder = tmp_path_factory.mktemp("metrics")
    logger = {"use_csv": True, "use_tensorboard": True, "wandb_offline": True, "log_interval": 1, "log_ranks": [0]}
    asked, environ = build_wandb_config(config, folder, **logger)
    with of_determined.run_master() as master:
        for after, lines, dies in (
            (0, [*FIRST_LINES, VALIDATION, *LOST_LINES], True),
            (7, [{**VALIDATION, "validation_loss": 0.0}, *RESUMED_LINES], False),
        ):
            script = {"after": after, "lines": lines, "dies": dies}
            world = LocalWorld(folder / "job", merge_config(asked, script=script), 1, {**environ, **master.environ}, script="write_sinks")
            assert world.wait() == [-signal.SIGKILL if dies else 0], world.read_log()
        yield folder, master


def read_jsonl(folder: Path, _: of_determined.DeterminedMaster) -> Points:
    records = [json.loads(line) for line in (folder / "job" / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], name, value) for line in records for name, value in line.items() if name != "step"]


def read_csv(folder: Path, _: of_determined.DeterminedMaster) -> Points:
    with (folder / "job" / "logs" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*range(1, 13)]
    return [(int(row["step"]), name, float(value)) for row in rows for name, value in row.items() if name != "step" and value]


def read_tensorboard(folder: Path, _: of_determined.DeterminedMaster) -> Points:
    """Return the points as TensorBoard's own reader reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "job" / "logs" / "tensorboard"))
    read.Reload()
    return [(point.step, name, point.value) for name in read.Tags()["scalars"] for point in read.Scalars(name)]


def read_wandb(folder: Path, _: of_determined.DeterminedMaster) -> Points:
    """Return the points that `wandb sync --append` sends, one file after the other."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    points = []
    for path in sorted((folder / "job" / "logs" / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [(row["_step"], name, value) for name, value in row.items() if name[0] != "_" and name != "step"]
        store.close()
    return points


def read_determined(folder: Path, master: of_determined.DeterminedMaster) -> Points:
    """Return the points of a master that keeps the last value it received for each step."""
    heard = {
        (line["stepsCompleted"], name): value for line in master.reported_metrics for name, value in line["metrics"]["avgMetrics"].items()
    }
    return [(step, name, value) for (step, name), value in heard.items()]


@pytest.mark.parametrize("read", [read_jsonl, read_csv, read_tensorboard, read_determined])
def test_each_step_once(
    logged_run: tuple[Path, of_determined.DeterminedMaster], read: Callable[[Path, of_determined.DeterminedMaster], Points]
) -> None:
    assert sorted(read(*logged_run)) == sorted(EXPECTED)


@pytest.mark.parametrize("received_lines", [0, 10], ids=["nothing", "all"])
def test_each_step_once_where_wandb_has_lines_of_a_killed_world(tmp_path: Path, config: dict[str, Any], received_lines: int) -> None:
    """With W&B's own client; only the service is a stand-in. The client may lose the last lines; the service forgets nothing."""
    first, again = ({"after": 0, "lines": [*FIRST_LINES, *LOST_LINES], "dies": True}, {"after": 7, "lines": RESUMED_LINES, "dies": False})
    world = LocalWorld(tmp_path / "job", merge_config(config, script=first, logger={"log_dir": "logs"}), 1, script="write_sinks")
    assert world.wait() == [-signal.SIGKILL], world.read_log()
    with wandb_service.run_service() as service:
        service.rows = [json.dumps({"_step": line["step"], **line}) for line in [*FIRST_LINES, *LOST_LINES][:received_lines]]
        online, environ = build_wandb_config(config, tmp_path, wandb_host=service.address)
        world = LocalWorld(tmp_path / "job", merge_config(online, script=again), 1, environ, script="write_sinks")
        assert world.wait() == [0], world.read_log()
        logged_losses = {row["_step"]: row["loss"] for row in map(json.loads, service.rows)}
        assert len(service.rows) == len(logged_losses)
    stands = [*FIRST_LINES, *LOST_LINES, *RESUMED_LINES[3:]] if received_lines else [*FIRST_LINES, *RESUMED_LINES]
    assert logged_losses == {line["step"]: line["loss"] for line in stands}
    assert find_files_with_key(tmp_path) == []


def test_a_resumed_run_logs_recomputed_steps_again_to_the_offline_files_of_wandb(
    logged_run: tuple[Path, of_determined.DeterminedMaster],
) -> None:
    """The killed world may not have written its last lines. The resumed one writes those after the step from which it resumes."""
    points = read_wandb(*logged_run)
    first, resumed = (
        [(line["step"], name, line[name]) for line in lines for name in line if name != "step"]
        for lines in ([*FIRST_LINES, VALIDATION, *LOST_LINES], RESUMED_LINES)
    )
    # The metrics of a step are in no order.
    assert sorted(points[-len(resumed) :]) == sorted(resumed)
    assert sorted(points[: -len(resumed)]) == sorted(first[: len(points) - len(resumed)])


@pytest.mark.test_all_only("runs a stand-in for Weights & Biases twice")
def test_recomputed_steps_are_sent_twice_where_the_files_of_two_worlds_are_sent_later(tmp_path: Path, config: dict[str, Any]) -> None:
    """By W&B's own command, in the order of the worlds."""
    offline, environ = build_wandb_config(config, tmp_path, wandb_offline=True)
    for after, lines in ((0, [*FIRST_LINES, *LOST_LINES]), (7, RESUMED_LINES)):
        world = LocalWorld(
            tmp_path / "job",
            merge_config(offline, script={"after": after, "lines": lines, "dies": False}),
            1,
            environ,
            script="write_sinks",
        )
        assert world.wait() == [0], world.read_log()
    files = sorted((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*"))
    assert len(files) == 2
    with wandb_service.run_service() as service:
        at = {"WANDB_BASE_URL": service.address, "WANDB_API_KEY": KEY, "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "wandb", "sync", "--append", *files]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **at}, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in service.rows]
    assert [(row["_step"], row["loss"]) for row in rows] == [
        (line["step"], line["loss"]) for line in (*FIRST_LINES, *LOST_LINES, *RESUMED_LINES)
    ]


def test_the_key_is_in_no_file(logged_run: tuple[Path, of_determined.DeterminedMaster]) -> None:
    assert find_files_with_key(logged_run[0]) == []


SINK_FACTORIES: dict[str, Callable[[Path], Sink]] = {
    "metrics.jsonl": lambda folder: MetricsFile(folder, 0),
    "metrics.csv": lambda folder: CsvTable(None, folder, ResumeHistory(0, ())),  # type: ignore[arg-type]  # files need no runtime
    "tensorboard/*": lambda folder: EventFile(None, folder, ResumeHistory(0, ())),  # type: ignore[arg-type]  # as above
}


@pytest.mark.parametrize("name", SINK_FACTORIES)
def test_a_full_disk_is_reported_once(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Files cannot grow for a while. Lines that did not fit are lost; neither earlier nor later ones are corrupt."""
    sink = SINK_FACTORIES[name](tmp_path)
    (path,) = tmp_path.glob(name)
    for step in (1, 2):
        sink.write_metrics({"step": step, "loss": 1.5})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        for step in (3, 4):
            sink.write_metrics({"step": step, "loss": 1.5, "longer": 0.123456789})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [record.message.count("metrics are lost") for record in caplog.records] == [1]
    sink.write_metrics({"step": 5, "loss": 2.5, "longer": 3.0})
    sink.close()
    after = path.read_bytes()
    assert len(after) > len(before)
    if name == "metrics.csv":
        assert after == b"step,loss,longer\n1,1.5,\n2,1.5,\n5,2.5,3.0\n"
    else:
        assert after.startswith(before)


def test_a_table_gets_columns_as_they_come_up(tmp_path: Path) -> None:
    table = CsvTable(None, tmp_path, ResumeHistory(2, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}]))  # type: ignore[arg-type]  # as above
    table.write_metrics({"step": 2, "validation_loss": 2.5})
    table.write_metrics({"step": 3, "loss": 1.0, "skipped": True, "node": 'a "b", c'})
    table.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,loss,validation_loss,skipped,node\n1,3.0,,,\n2,,2.5,,\n3,1.0,,true,"a ""b"", c"\n'
    )
