"""The resource usage of a node, from control groups of both versions, and from the processes themselves."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarmtrain.entrypoint.gpu_query import GpuQuery
from swarmtrain.entrypoint.resource_usage import Cgroup, UsageMeter, parse_gpu_usage, read_machine_memory

MIB = 2**20
CGROUP_V1 = {
    "memory/memory.usage_in_bytes": f"{300 * MIB}\n",
    "memory/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {100 * MIB}\n",
    "memory/memory.limit_in_bytes": f"{512 * MIB}\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "cpuacct/cpuacct.usage": "2500000000\n",
    "cpu/cpu.cfs_quota_us": "150000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
}
CGROUP_V2 = {
    "memory.current": f"{300 * MIB}\n",
    "memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
    "memory.max": f"{512 * MIB}\n",
    "memory.events": "low 0\noom 3\noom_kill 2\n",
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    "cpu.max": "150000 100000\n",
}
UNLIMITED = (
    {**CGROUP_V1, "memory/memory.limit_in_bytes": "9223372036854771712\n", "cpu/cpu.cfs_quota_us": "-1\n"},
    {**CGROUP_V2, "memory.max": "max\n", "cpu.max": "max 100000\n"},
)


def write_cgroup(root: Path, files: dict[str, str]) -> Cgroup:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Cgroup(root)


@pytest.mark.parametrize("files", [CGROUP_V1, CGROUP_V2], ids=["v1", "v2"])
def test_a_control_group_says_what_is_used_and_allowed(tmp_path: Path, files: dict[str, str]) -> None:
    found = write_cgroup(tmp_path, files)
    assert (found.read_cpu_seconds(), found.read_cpu_limit()) == (2.5, 1.5)
    assert (found.read_memory_usage(), found.read_memory_limit(), found.read_oom_kill_count()) == (200 * MIB, 512 * MIB, 2)


@pytest.mark.parametrize("files", UNLIMITED, ids=["v1", "v2"])
def test_without_a_limit_the_machine_is_the_limit(tmp_path: Path, files: dict[str, str]) -> None:
    found = write_cgroup(tmp_path, files)
    assert (found.read_cpu_limit(), found.read_memory_limit()) == (None, None)
    read = UsageMeter(found).read_usage()
    assert (read["cpus"], read["memory_limit"]) == (len(os.sched_getaffinity(0)), read_machine_memory())
    assert (read["cpu"], read["memory"]) == (0.0, 200 * MIB)


def test_where_there_is_no_control_group_the_processes_are_added_up(tmp_path: Path) -> None:
    for cgroup in (None, Cgroup(tmp_path)):
        meter, started, used = UsageMeter(cgroup), time.monotonic(), time.process_time()
        held = bytearray(os.urandom(64 * MIB))
        sum(range(5_000_000))
        cores = (time.process_time() - used) / (time.monotonic() - started)  # a small number on a busy machine
        read = meter.read_usage()
        assert read["cpu"] > cores / 2 > 0
        assert len(held) < read["memory"] < read_machine_memory()


# Runs as root in its own network namespace. First loopback; then a veth pair to a second namespace, which sends 2 MiB back.
NETWORK = """
import json, socket, subprocess, sys, time
from swarmtrain.entrypoint.resource_usage import UsageMeter, read_network_bytes

PEER = "import socket; s = socket.create_server(('10.9.9.2', 7000)); print(flush=True); c, _ = s.accept(); " \\
       "c.recv(2**20, socket.MSG_WAITALL); c.sendall(bytes(2 * 2**20))"

def run(*argv):
    subprocess.run(argv, check=True)

def measure(act):
    meter, before, started = UsageMeter(None), read_network_bytes(), time.monotonic()
    act()
    counted = [after - earlier for after, earlier in zip(read_network_bytes(), before)]
    read = meter.read_usage()
    seconds = time.monotonic() - started
    return {"counted": counted, "by_rate": [read[name] * seconds for name in ("received", "sent")]}

def use_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        for _ in range(100):
            sender.sendall(bytes(2**14))
            receiver.recv(2**14, socket.MSG_WAITALL)

def use_cable():
    with socket.create_connection(("10.9.9.2", 7000)) as connection:
        connection.sendall(bytes(2**20))
        connection.recv(2 * 2**20, socket.MSG_WAITALL)

run("ip", "link", "set", "lo", "up")
loopback = measure(use_loopback)
holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
holder.stdout.readline()
there = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
for prefix, address in (([], "10.9.9.1/24"), (there, "10.9.9.2/24")):
    run(*prefix, "ip", "address", "add", address, "dev", "eth0")
    run(*prefix, "ip", "link", "set", "eth0", "up")
peer = subprocess.Popen([*there, sys.executable, "-c", PEER], stdout=subprocess.PIPE)
peer.stdout.readline()
cable = measure(use_cable)
peer.wait()
holder.stdin.close()
holder.wait()
print(json.dumps([loopback, cable]))
"""


def test_what_goes_over_the_network_is_counted_and_loopback_is_not() -> None:
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip("only root makes network namespaces")
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", NETWORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loopback, cable = json.loads(done.stdout)
    assert loopback == {"counted": [0, 0], "by_rate": [0, 0]}
    # Data, headers, acknowledgements, and TCP retransmissions on a busy machine.
    received, sent = cable["counted"]
    assert 2 * MIB < received < 2.6 * MIB
    assert MIB < sent < 1.3 * MIB
    assert all(cable["by_rate"])


def test_gpus_are_what_the_drivers_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parse_gpu_usage(GpuQuery().read_sample()) == []
    tool = tmp_path / "nvidia-smi"
    rest = ", GPU-1, 00000000:3B:00.0, 0, [N/A], 16, 16"
    rows = [
        "93, 60000, 81559, 71, 642.31, 0x0000000000000004",
        "5, 1, 81559, 90, 80.00, 0x0000000000000048",
        "0, 1, 81559, [N/A], [N/A], [N/A]",
        "[N/A], [N/A], 81559, 40, 70.00, 0x0",
    ]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}{rest}'\n" for row in rows))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    expected = [
        {"utilization": 93, "memory": 60000 * MIB, "memory_total": 81559 * MIB, "temperature": 71, "power": 642, "throttled": False},
        {"utilization": 5, "memory": MIB, "memory_total": 81559 * MIB, "temperature": 90, "power": 80, "throttled": True},
        {"utilization": 0, "memory": MIB, "memory_total": 81559 * MIB},
    ]
    assert parse_gpu_usage(GpuQuery().read_sample()) == expected
    tool.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert parse_gpu_usage(GpuQuery().read_sample()) == []


# A driver that has the older name of the clock event reasons, and does not know the fields of pages and links.
OLD_DRIVER = """#!/bin/sh
echo "$1" >> {log}
for field in clocks_event_reasons.active retired_pages.pending pcie.link.width.current pcie.link.width.max; do
    case "$1" in *"$field"*) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac
done
case "$1" in *remapped_rows*) echo "Option is not recognized"; exit 2 ;; esac
echo "93, 60000, 81559, 90, 642.31, 0x48, GPU-1, 00000000:3B:00.0, 0"
"""


def test_a_field_that_the_driver_does_not_know_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool, log = tmp_path / "nvidia-smi", tmp_path / "queries"
    tool.write_text(OLD_DRIVER.format(log=log))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    query = GpuQuery()
    assert parse_gpu_usage(query.read_sample())[0]["throttled"] is True
    first_count = len(log.read_text().splitlines())
    assert first_count == 6  # remapped rows, four refused fields, and the query that is accepted
    for _ in range(4):
        assert query.read_sample().gpus[0]["ecc.errors.uncorrected.volatile.total"] == "0"
    assert len(log.read_text().splitlines()) == first_count + 4
