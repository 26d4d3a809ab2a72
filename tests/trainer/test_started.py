"""What runs where is told as a world begins: in a file, in the log, on the notice board; and no secret is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_metrics import of
from worlds import World, changed

from swarmtrain import wire
from swarmtrain.trainer.started import _spans
from swarmtrain.wire import Event

HUSH, OWN = "hush-4be1", "own-77c3"


def test_what_runs_where(tmp_path: Path, config: dict[str, Any], board: str, published: list[Event]) -> None:
    (tmp_path / "key").write_text(HUSH)
    environ = {
        "SWARMTRAIN_BOARD": board,
        "SWARMTRAIN_SECRETS": json.dumps({"TOKEN": str(tmp_path / "key")}),
        "MY_API_KEY": OWN,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    told = changed(config, runner={"env": {"MY_API_KEY": OWN}, "secrets": {"TOKEN": "key"}}, topology={"model_parallel_size": 2})
    world = World(tmp_path, told, 2, environ)
    assert world.wait() == [0, 0], world.log()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(place["rank"], place["tensor"], place["data"]) for place in report["ranks"]] == [(0, 0, 0), (1, 1, 0)]
    assert report["communication"]["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert report["config"]["trainer"]["train_iterations"] == config["trainer"]["train_iterations"]
    assert report["config"]["runner"]["env"] == {"MY_API_KEY": "…"}
    assert {"torch", "python", "swarmtrain"} <= report["versions"].keys()
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert lines[0].startswith(f"swarmtrain {report['versions']['swarmtrain']}, python ")
    assert lines[1] == "ranks talk by gloo over lo"
    assert f"{report['ranks'][0]['host']}, ranks 0-1, 2 × " in lines[2]
    (event,) = of(published, wire.REPORT)
    assert (event["ranks"], event["versions"]) == ("0-1", report["versions"])
    given = tmp_path / "key"
    everything = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and path != given]
    said = [*lines, json.dumps(report), *(each.to_line() for each in published)]
    assert not [text for text in [*everything, *said] if HUSH in text]
    assert not [text for text in said if OWN in text]


def test_spans() -> None:
    assert _spans([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11"
