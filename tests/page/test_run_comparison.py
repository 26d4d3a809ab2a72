"""The comparison of two runs: losses over steps and tokens, config keys and facts that differ, and what cannot be compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sample_run

from swarmtrain import protocol
from swarmtrain.__main__ import run_program
from swarmtrain.config import Config
from swarmtrain.errors import ComparisonError
from swarmtrain.launchers.common.history_store import EVENTS_FILE, RecordedRun
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.page_data import PageData, build_page_data_from_events, collect_token_rates
from swarmtrain.view.dashboard.run_comparison import build_comparison, count_tokens, load_comparison

CONFIG: dict[str, object] = {"runner": {"env": {"LICENSE": "value-that-stays-here"}}, "optimizer": {"beta1": 0.9}}


def record_run(run: str, run_id: str, events: list[Event] | None = None, config: dict[str, object] | None = None) -> RunDataSource:
    """Store the records of a run that is down, and return its data source."""
    recorded_run = RecordedRun(run, RunIdentity(run_id))
    recorded_run.create_folder()
    events = sample_run.build_events(outcome="done") if events is None else events
    (recorded_run.folder / EVENTS_FILE).write_text("".join(f"{event.to_line()}\n" for event in events))
    if config is not None:
        recorded_run.save_config(Config.model_validate_json(json.dumps(config)))
    return RunDataSource(recorded_run, None)


def build_page(*events: Event) -> PageData:
    return build_page_data_from_events("demo", events, (), (), 1000.0)


def report(tokens: int, at: float) -> Event:
    return Event(protocol.EVENT_RUN_REPORT, {"node": "node0", "tokens_per_step": tokens, "versions": {"torch": f"2.{tokens}"}}, at)


def progress(step: int, at: float, **values: object) -> Event:
    return Event(protocol.EVENT_PROGRESS, {"step": step, **values}, at)


def test_tokens_follow_the_batch_of_each_step() -> None:
    events = [
        report(100, 1),
        progress(10, 2),
        progress(20, 3),
        report(300, 4),
        Event(protocol.EVENT_RESUMED, {"step": 15}, 5),
        progress(16, 6),
    ]
    rates = collect_token_rates(events)
    assert rates == [[0, 100], [15, 300]]
    assert [count_tokens(step, rates) for step in (0, 10, 15, 16, 25)] == [0, 1000, 1500, 1800, 4500]
    assert collect_token_rates([report(100, 1), report(100, 2), progress(5, 3), report(100, 4)]) == [[0, 100]]
    assert collect_token_rates([progress(5, 3)]) == []


def test_a_run_that_continues_another_counts_its_first_steps_with_its_first_batch() -> None:
    rates = collect_token_rates([report(100, 1), Event(protocol.EVENT_RESUMED, {"step": 40}, 2), progress(41, 3)])
    assert count_tokens(41, rates) == 4100


def test_losses_are_on_one_axis_over_steps_and_tokens() -> None:
    first = build_page(
        report(10, 1), progress(1, 2, loss=5.0), Event(protocol.EVENT_EVALUATION, {"step": 1, "loss": 5.5}, 3), progress(2, 4, loss=4.0)
    )
    second = build_page(report(20, 1), progress(1, 2, loss=6.0))
    comparison = build_comparison(["a", "b"], [first, second], None, "no config")
    assert {name: curve["steps"] for name, curve in comparison["axes"]["steps"].items()} == {
        "0.loss": [1, 2],
        "0.validation": [1],
        "1.loss": [1],
    }
    assert {name: curve["steps"] for name, curve in comparison["axes"]["tokens"].items()} == {
        "0.loss": [10, 20],
        "0.validation": [10],
        "1.loss": [20],
    }
    assert [run["lowest_validation_loss"] for run in comparison["runs"]] == [5.5, None]
    assert comparison["facts"] == [
        {"key": "tokens_per_step", "values": ["10", "20"]},
        {"key": "versions.torch", "values": ["2.10", "2.20"]},
    ]
    without = build_comparison(["a", "b"], [first, build_page(progress(1, 2, loss=6.0))], None, "no config")
    assert ("tokens" in without["axes"], without["without_tokens"]) == (False, ["b"])


def test_config_keys_that_differ_and_no_value_of_an_environment_variable() -> None:
    other = {"runner": {"env": {"LICENSE": "another", "MODE": "x"}}, "optimizer": {"beta1": 0.8}}
    sources = [record_run("first", "a" * 12, config=CONFIG), record_run("second", "b" * 12, config=other)]
    comparison = load_comparison(sources)
    assert comparison["config"] == [
        {"key": "runner.env.MODE", "values": ["null", '"…"']},
        {"key": "optimizer.beta1", "values": ["0.9", "0.8"]},
    ]
    assert "value-that-stays-here" not in "".join(path.read_text() for path in sources[0]._recorded_run.folder.iterdir())


def test_a_config_that_is_not_known_is_a_note_with_its_reason() -> None:
    comparison = load_comparison([record_run("first", "a" * 12, config=CONFIG), record_run("second", "b" * 12)])
    assert comparison["config"] is None
    assert comparison["config_note"] == "run second: it is down, and its config is not recorded on this machine"
    broken = record_run("third", "c" * 12, config=CONFIG)
    (broken._recorded_run.folder / "config.json").write_text('{"runner": {"nodes": "many"}}')
    assert "recorded by another version" in load_comparison([record_run("first", "a" * 12, config=CONFIG), broken])["config_note"]


def test_runs_of_the_same_name_are_named_by_their_ids() -> None:
    comparison = load_comparison([record_run("demo", "a" * 12), record_run("demo", "b" * 12)])
    assert [run["name"] for run in comparison["runs"]] == ["a" * 12, "b" * 12]


def test_what_cannot_be_compared_is_rejected() -> None:
    first, second = record_run("first", "a" * 12), record_run("second", "b" * 12)
    silent = record_run("silent", "c" * 12, [Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "silent"}, 1.0)])
    for sources, message in (
        ([], "comparison: needs two runs, but got 0"),
        ([first], "comparison: needs two runs, but got 1: first"),
        ([first, second, silent], "comparison: needs two runs, but got 3: first, second, silent"),
        ([first, record_run("first", "a" * 12)], "comparison: both runs are the same one: first, id aaaaaaaaaaaa"),
        ([first, silent], "run silent: has no loss curve: it has not reported a loss so far"),
    ):
        with pytest.raises(ComparisonError) as raised:
            load_comparison(sources)
        assert str(raised.value) == message
        assert "swarmtrain" in str(raised.value.hint)


def run_report(*argv: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["swarmtrain", "report", *argv])
    return run_program()


def test_the_report_of_two_runs_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.chdir(tmp_path)
    evil = "</script><script>document.title='taken'</script>"
    record_run("first", "a" * 12, config=CONFIG)
    record_run("second", "b" * 12, config={"logger": {"wandb_project": evil}})
    record_run("third", "c" * 12)
    assert run_report("first", "second", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().err == "wrote first-second.html\n"
    html = (tmp_path / "first-second.html").read_text()
    assert evil not in html
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:)", html)
    page = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])["page"]  # type: ignore[index]
    assert [run["name"] for run in page["runs"]] == ["first", "second"]
    assert [row["values"][1] for row in page["config"] if row["key"] == "logger.wandb_project"] == [json.dumps(evil)]
    for argv, message in (
        (("first", "second", "third"), "error: comparison: needs two runs, but got 3: first, second, third\nhint: "),
        (("first", "first"), "error: comparison: both runs are the same one: first, id aaaaaaaaaaaa\nhint: "),
        (("first", "never"), "error: Docker engine at unix://"),
        (("first", "second"), "error: first-second.html: already exists\nhint: add --force"),
    ):
        assert run_report(*argv, monkeypatch=monkeypatch) == 1
        assert capsys.readouterr().err.startswith(message)
    assert [path.name for path in tmp_path.glob("*.html")] == ["first-second.html"]
