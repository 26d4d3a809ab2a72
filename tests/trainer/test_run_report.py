"""The run report at the start of a world: in a file, in the log, and at the coordinator; it has no secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_metrics import filter_events
from worlds import LocalWorld, merge_config

from swarmtrain import protocol
from swarmtrain.protocol import Event
from swarmtrain.trainer.run_report import _format_number_ranges

SECRET, OWN_SECRET = "hush-4be1", "own-77c3"


def test_what_runs_where(tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]) -> None:
    (tmp_path / "key").write_text(SECRET)
    environ = {
        "SWARMTRAIN_COORDINATOR": coordinator_address,
        "SWARMTRAIN_SECRETS": json.dumps({"TOKEN": str(tmp_path / "key")}),
        "MY_API_KEY": OWN_SECRET,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    config = merge_config(
        config, runner={"env": {"MY_API_KEY": OWN_SECRET}, "secrets": {"TOKEN": "key"}}, topology={"model_parallel_size": 2}
    )
    world = LocalWorld(tmp_path, config, 2, environ)
    assert world.wait() == [0, 0], world.read_log()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(place["rank"], place["tensor_rank"], place["data_rank"]) for place in report["ranks"]] == [(0, 0, 0), (1, 1, 0)]
    assert report["communication"]["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert report["config"]["trainer"]["train_iterations"] == config["trainer"]["train_iterations"]
    assert report["config"]["runner"]["env"] == {"MY_API_KEY": "…"}
    assert {"torch", "python", "swarmtrain"} <= report["versions"].keys()
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert lines[0].startswith(f"swarmtrain {report['versions']['swarmtrain']}, python ")
    assert lines[1] == "ranks communicate via gloo over lo"
    assert f"{report['ranks'][0]['host']}, ranks 0-1, 2 × " in lines[2]
    (event,) = filter_events(published_events, protocol.EVENT_RUN_REPORT)
    assert (event["ranks"], event["versions"]) == ("0-1", report["versions"])
    samples, length = config["topology"]["global_batch_size"], config["transformer_architecture"]["sequence_length"]
    assert event["tokens_per_step"] == samples * length
    given = tmp_path / "key"
    everything = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and path != given]
    said = [*lines, json.dumps(report), *(each.to_line() for each in published_events)]
    assert not [text for text in [*everything, *said] if SECRET in text]
    assert not [text for text in said if OWN_SECRET in text]


def test_spans() -> None:
    assert _format_number_ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11"
