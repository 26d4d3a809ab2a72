"""What every sink keeps: each step once, over a crash too, and a place that is full or away never stops training."""

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

import master as of_determined
import pytest
import wandb_service
from test_metrics import KEY, files_with_the_key, wandb_config
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore
from worlds import World, changed

from swarmtrain.trainer.metrics.sinks import Sink
from swarmtrain.trainer.metrics.sinks.lines import MetricsFile
from swarmtrain.trainer.metrics.sinks.offline_files import cut_off
from swarmtrain.trainer.metrics.sinks.past import Past
from swarmtrain.trainer.metrics.sinks.table import Table
from swarmtrain.trainer.metrics.sinks.tensorboard import EventFile

Points = list[tuple[int, str, float]]
"""Step, name, value; a point that is there twice is there twice."""

FIRST = [{"step": step, "loss": step + 0.25} for step in range(1, 8)]
EVALUATED = {"step": 7, "held_out_loss": 7.75}
LOST = [{"step": step, "loss": 0.0} for step in range(8, 11)]
AGAIN = [{"step": step, "loss": step + 0.5, "late": step} for step in range(8, 13)]
EXPECTED = [(line["step"], name, line[name]) for line in (*FIRST, EVALUATED, *AGAIN) for name in line if name != "step"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[tuple[Path, of_determined.Master]]:
    """A run that told all sinks at once of 10 steps, was killed, went on after the seventh, and ended."""
    folder = tmp_path_factory.mktemp("told")
    logger = {"use_csv": True, "use_tensorboard": True, "wandb_offline": True, "log_interval": 1, "log_ranks": [0]}
    asked, environ = wandb_config(config, folder, **logger)
    with of_determined.answering() as master:
        for after, lines, dies in ((0, [*FIRST, EVALUATED, *LOST], True), (7, [{**EVALUATED, "held_out_loss": 0.0}, *AGAIN], False)):
            script = {"after": after, "lines": lines, "dies": dies}
            world = World(folder / "job", changed(asked, script=script), 1, {**environ, **master.environ}, script="sinking")
            assert world.wait() == [-signal.SIGKILL if dies else 0], world.log()
        yield folder, master


def lines(folder: Path, _: of_determined.Master) -> Points:
    read = [json.loads(line) for line in (folder / "job" / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], name, value) for line in read for name, value in line.items() if name != "step"]


def table(folder: Path, _: of_determined.Master) -> Points:
    with (folder / "job" / "logs" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*range(1, 13)]
    return [(int(row["step"]), name, float(value)) for row in rows for name, value in row.items() if name != "step" and value]


def tensorboard(folder: Path, _: of_determined.Master) -> Points:
    """As TensorBoard's own reader has it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "job" / "logs" / "tensorboard"))
    read.Reload()
    return [(point.step, name, point.value) for name in read.Tags()["scalars"] for point in read.Scalars(name)]


def wandb(folder: Path, _: of_determined.Master) -> Points:
    """What `wandb sync --append` sends of one file after the other."""
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


def determined(folder: Path, master: of_determined.Master) -> Points:
    """What a master has that keeps of each step what it has heard last."""
    heard = {(line["stepsCompleted"], name): value for line in master.reported for name, value in line["metrics"]["avgMetrics"].items()}
    return [(step, name, value) for (step, name), value in heard.items()]


@pytest.mark.parametrize("read", [lines, table, tensorboard, wandb, determined])
def test_each_step_once(told: tuple[Path, of_determined.Master], read: Callable[[Path, of_determined.Master], Points]) -> None:
    assert sorted(read(*told)) == sorted(EXPECTED)


@pytest.mark.parametrize("heard", [0, 10], ids=["nothing", "all"])
def test_each_step_once_where_wandb_has_heard_of_a_killed_world(tmp_path: Path, config: dict[str, Any], heard: int) -> None:
    """Its own client, of which only the other end of the wire is ours. It may lose what it was told last; its service forgets nothing."""
    first, again = ({"after": 0, "lines": [*FIRST, *LOST], "dies": True}, {"after": 7, "lines": AGAIN, "dies": False})
    world = World(tmp_path / "job", changed(config, script=first, logger={"log_dir": "logs"}), 1, script="sinking")
    assert world.wait() == [-signal.SIGKILL], world.log()
    with wandb_service.answering() as service:
        service.rows = [json.dumps({"_step": line["step"], **line}) for line in [*FIRST, *LOST][:heard]]
        online, environ = wandb_config(config, tmp_path, wandb_host=service.address)
        world = World(tmp_path / "job", changed(online, script=again), 1, environ, script="sinking")
        assert world.wait() == [0], world.log()
        told = {row["_step"]: row["loss"] for row in map(json.loads, service.rows)}
        assert len(service.rows) == len(told)
    stands = [*FIRST, *LOST, *AGAIN[3:]] if heard else [*FIRST, *AGAIN]
    assert told == {line["step"]: line["loss"] for line in stands}
    assert files_with_the_key(tmp_path) == []


@pytest.mark.test_all_only("runs a stand-in for Weights & Biases twice")
def test_each_step_once_where_the_files_of_two_worlds_are_sent_later(tmp_path: Path, config: dict[str, Any]) -> None:
    """By W&B's own command, and though the first world had written all of its file before it was lost."""
    offline, environ = wandb_config(config, tmp_path, wandb_offline=True)
    for after, told in ((0, [*FIRST, *LOST]), (7, AGAIN)):
        world = World(
            tmp_path / "job", changed(offline, script={"after": after, "lines": told, "dies": False}), 1, environ, script="sinking"
        )
        assert world.wait() == [0], world.log()
    files = sorted((tmp_path / "job" / "logs" / "wandb").glob("offline-run-*"))
    assert len(files) == 2
    with wandb_service.answering() as service:
        at = {"WANDB_BASE_URL": service.address, "WANDB_API_KEY": KEY, "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "wandb", "sync", "--append", *files]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **at}, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in service.rows]
    assert [(row["_step"], row["loss"]) for row in rows] == [(line["step"], line["loss"]) for line in (*FIRST, *AGAIN)]


@pytest.mark.parametrize("left", range(9))
def test_files_of_wandb_that_are_cut_at_the_end_of_a_block_can_be_read(left: int, tmp_path: Path) -> None:
    """A record's head has seven bytes; where fewer are left, the block is filled up."""
    path = tmp_path / "offline-run-1-x" / "run-x.wandb"
    path.parent.mkdir()
    one, two, three = (Record(history={"step": {"num": step}}) for step in (1, 2, 3))
    two.uuid = "x" * 30_000
    two.uuid += "x" * ((1 << 15) - left - 7 - (7 + one.ByteSize()) - (7 + two.ByteSize()))
    store: Any = DataStore()  # its methods are not typed
    store.open_for_write(str(path))
    for record in (one, two, three):
        store.write(record)
    store.close()
    assert cut_off(tmp_path, "x", 3) == 2
    assert path.stat().st_size == (1 << 15) - (left if left >= 7 else 0)
    read: Any = DataStore()
    read.open_for_scan(str(path))
    assert [Record.FromString(read.scan_data()).history.step.num for _ in range(2)] == [1, 2]
    assert read.scan_data() is None


def test_the_key_is_in_no_file(told: tuple[Path, of_determined.Master]) -> None:
    assert files_with_the_key(told[0]) == []


OPENED: dict[str, Callable[[Path], Sink]] = {
    "metrics.jsonl": lambda folder: MetricsFile(folder, 0),
    "metrics.csv": lambda folder: Table(None, folder, Past(0, ())),  # type: ignore[arg-type]  # files need no surroundings
    "tensorboard/*": lambda folder: EventFile(None, folder, Past(0, ())),  # type: ignore[arg-type]  # as above
}


@pytest.mark.parametrize("name", OPENED)
def test_a_disk_that_is_full_is_told_once(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Files cannot grow for a while. What did not fit is lost, and neither what was before nor what comes after is torn."""
    sink = OPENED[name](tmp_path)
    (path,) = tmp_path.glob(name)
    for step in (1, 2):
        sink.write({"step": step, "loss": 1.5})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        for step in (3, 4):
            sink.write({"step": step, "loss": 1.5, "longer": 0.123456789})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [record.message.count("no more metrics") for record in caplog.records] == [1]
    sink.write({"step": 5, "loss": 2.5, "longer": 3.0})
    sink.close()
    after = path.read_bytes()
    assert len(after) > len(before)
    if name == "metrics.csv":
        assert after == b"step,loss,longer\n1,1.5,\n2,1.5,\n5,2.5,3.0\n"
    else:
        assert after.startswith(before)


def test_a_table_gets_columns_as_they_come_up(tmp_path: Path) -> None:
    table = Table(None, tmp_path, Past(2, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}]))  # type: ignore[arg-type]  # as above
    table.write({"step": 2, "held_out_loss": 2.5})
    table.write({"step": 3, "loss": 1.0, "skipped": True, "node": 'a "b", c'})
    table.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,loss,held_out_loss,skipped,node\n1,3.0,,,\n2,,2.5,,\n3,1.0,,true,"a ""b"", c"\n'
    )
