"""A script sees under a node's supervisor what it sees under torchrun: environment, arguments, signals, exit codes, and its own output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from swarmtrain.process import start_process
from swarmtrain.protocol.run_key import create_run_key

TORCHRUN = os.environ.get("SWARMTRAIN_TEST_TORCHRUN_PYTHON", sys.executable)
"""Interpreter whose torchrun is the reference."""
PREFIX_PATTERN = re.compile(r"^\[rank (\d+)\] (.*)$", re.MULTILINE)
# Variables whose values differ between any two runs, or that depend on options of torchrun.
OF_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
RUN_SPECIFIC = {
    "MASTER_PORT",
    "MASTER_ADDR",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "OMP_NUM_THREADS",
}
ADDED_PATTERN = re.compile("SWARMTRAIN_|GLOO_SOCKET_IFNAME|NCCL_SOCKET_IFNAME|TP_SOCKET_IFNAME")


@dataclass
class RankOutput:
    """What the ranks of one run have printed, by rank, and the exit code of each failed rank by local rank."""

    lines: dict[int, list[str]]
    exit_codes: dict[int, int]


def parse_lines(output: str) -> dict[int, list[str]]:
    lines: dict[int, list[str]] = {}
    for rank, line in PREFIX_PATTERN.findall(output):
        lines.setdefault(int(rank), []).append(line)
    return lines


class BothLaunchers:
    """Starts the same script with two ranks under torchrun and under a node's supervisor."""

    def __init__(self, small_run: Any) -> None:
        self.run, self.folder = small_run, small_run.folder
        self.environment: dict[str, str] = {}
        """Variables of both launchers, in addition to their own."""

    def start_torchrun(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        (self.folder / "torchrun_script.py").write_text(script)
        options = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--role=rank", "--tee=3", "--max-restarts=0"]
        options += [f"--log-dir={self.folder / 'torchrun'}"]
        command = [TORCHRUN, "-m", "torch.distributed.run", *options, str(self.folder / "torchrun_script.py"), *arguments]
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            **self.environment,
        }
        with (self.folder / "torchrun.log").open("wb") as log:
            return start_process(command, env=environment, cwd=self.folder, stdout=log, stderr=log, die_with_parent=True)

    def read_torchrun(self) -> RankOutput:
        output = (self.folder / "torchrun.log").read_text(errors="replace")
        exit_codes = {
            int(rank): int(code) for rank, code in re.findall(r"rank\s+: \d+ \(local_rank: (\d+)\)\n\s+exitcode\s+: (-?\d+)", output)
        }
        return RankOutput(parse_lines(output), exit_codes)

    def start_node(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        self.run.start_coordinator(max_restarts=0, environment=self.environment)
        options = {"slots": 2, "node_range": (1, 1), "environment": self.environment}
        node: subprocess.Popen[bytes] = self.run.start_node(0, script, *arguments, **options)
        return node

    def read_node(self) -> RankOutput:
        exit_codes = {}
        for event in self.run.read_events("failure"):
            code = event.data.get("exit_code")
            exit_codes[event.data["local_rank"]] = -getattr(signal, event.data["signal"]) if code is None else code
        return RankOutput(parse_lines(self.run.read_output()), exit_codes)

    def run_both(self, script: str, *arguments: str) -> tuple[RankOutput, RankOutput]:
        """Run `script` to its end under torchrun and under the supervisor, and return the output of both."""
        self.start_torchrun(script, *arguments).wait(120)
        self.start_node(script, *arguments)
        self.run.wait_for_exit()
        return self.read_torchrun(), self.read_node()


@pytest.fixture
def both(small_run: Any) -> BothLaunchers:
    return BothLaunchers(small_run)


@pytest.mark.parametrize("store", ["of rank 0", "of the agent"])
def test_environment_and_arguments(both: BothLaunchers, store: str) -> None:
    """Without a key, rank 0 serves the ranks' store. With a key, the agent does, as torchrun's does by default."""
    if store == "of the agent":
        (both.folder / "key").write_bytes(create_run_key())
        both.environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "SWARMTRAIN_KEY_FILE": str(both.folder / "key")}
    script = (
        "import json, os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()\n"
        "print('ENVIRONMENT', json.dumps(dict(os.environ)))\n"
        "print('ARGUMENTS', json.dumps([sys.argv[1:], __name__, os.path.basename(sys.argv[0]).endswith('script.py'), sys.stdin.read()]))\n"
        "print('on stderr', file=sys.stderr)\n"
    )
    expected, actual = both.run_both(script, "--lr", "1 2", "--", "-x")
    for rank in (0, 1):
        environments = []
        for output in (expected, actual):
            (line,) = [line for line in output.lines[rank] if line.startswith("ENVIRONMENT ")]
            environments.append(json.loads(line.removeprefix("ENVIRONMENT ")))
        environment = environments[1]
        reference = {name: value for name, value in environments[0].items() if not ADDED_PATTERN.match(name)}
        ours = {name: value for name, value in environment.items() if not ADDED_PATTERN.match(name)}
        assert set(ours) - set(reference) <= {"PWD", "OLDPWD", "PYTHONPATH"} | set(os.environ)
        assert set(reference) - set(ours) <= set(os.environ) | OF_TORCHRUN
        for name in sorted(set(reference) & set(ours) - RUN_SPECIFIC - set(os.environ)):
            assert ours[name] == reference[name], name
        assert environment["TORCHELASTIC_USE_AGENT_STORE"] == str(store == "of the agent")
        assert {
            "RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_ERROR_FILE",
        } <= ours.keys()
        others = [sorted(line for line in output.lines[rank] if not line.startswith("ENVIRONMENT ")) for output in (expected, actual)]
        assert others[0] == others[1]


@pytest.mark.parametrize(
    ("end", "codes"),
    [
        ("sys.exit()", {}),
        ("os._exit(0)", {}),
        ("sys.exit(3)", {1: 3}),
        ("sys.exit(-1)", {1: 255}),
        ("sys.exit('no data')", {1: 1}),
        ("raise ValueError('boom')", {1: 1}),
        ("os.kill(os.getpid(), signal.SIGKILL)", {1: -9}),
        ("os.abort()", {1: -6}),
    ],
)
def test_exit_codes(both: BothLaunchers, end: str, codes: dict[int, int]) -> None:
    script = (
        "import os, signal, sys, time\nprint('here', flush=True)\nother_has_started = __file__ + '.started'\n"
        f"if os.environ['RANK'] == '1':\n    while not os.path.exists(other_has_started): time.sleep(0.05)\n    {end}\n"
        "open(other_has_started, 'w').close()\n"
    )
    if codes:
        script += "time.sleep(60)\n"
    expected, actual = both.run_both(script)
    assert expected.exit_codes.items() >= codes.items()
    assert actual.exit_codes == codes
    assert [lines[0] for _, lines in sorted(actual.lines.items())] == ["here", "here"]


def test_the_error_file_that_record_writes(both: BothLaunchers) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n    raise ValueError('boom')\nmain()\n"
    )
    both.run_both(script)
    messages = []
    for folder in ("torchrun", "log0"):
        (path, *_) = sorted((both.folder / folder).glob("*/attempt_0/*/error.json"))
        messages.append(json.loads(path.read_text())["message"])
    reference, message = messages
    assert message["message"] == reference["message"] == "ValueError: boom"
    assert message["extraInfo"].keys() == reference["extraInfo"].keys()
    for each in messages:
        assert "raise ValueError('boom')" in each["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_reaches_every_rank_which_may_end_in_its_own_time(both: BothLaunchers, number: signal.Signals) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    print('received', signal.Signals(number).name, flush=True); time.sleep(1); print('saved', flush=True); sys.exit(75)\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    outputs: list[tuple[Callable[..., subprocess.Popen[bytes]], Callable[[], RankOutput]]] = [
        (both.start_torchrun, both.read_torchrun),
        (both.start_node, both.read_node),
    ]
    results = []
    for start, read in outputs:
        process = start(script)
        wait_until(lambda read=read: [lines[:1] for lines in read().lines.values()] == [["ready"]] * 2)
        process.send_signal(number)
        process.wait(60)
        results.append({rank: lines for rank, lines in read().lines.items() if rank in (0, 1)})
    assert results[0] == results[1] or number == signal.SIGINT
    assert all(lines[0] == "ready" and lines[-1] == "saved" for lines in results[1].values())


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
