"""What `why` recognizes.

Of the 35 ways to fail that `why` recognizes, 22 happen for real in this test, by processes that fail in that way; for 3 (image, no node,
mount) a real Swarm gives the reason in tests/lab, and its words are recognized here; 3 (container killed, node lost, unresponsive) are
recognized in the recordings of real runs; for 7 (GPU memory, GPU architecture, GPU driver, no GPU, GPU assertion, GPU fault, NCCL) only
the words of torch, NCCL, Docker or swarmtrain are recognized.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_suspects import read_recording

from swarmtrain.entrypoint.resource_usage import Cgroup
from swarmtrain.entrypoint.supervisor.rank_exit import describe_out_of_memory
from swarmtrain.view.known_failures import FAILURE_SIGNATURES, FailureEvidence, identify_failure
from swarmtrain.view.why import diagnose_failure

ROOT = Path(__file__).parents[2]
MIB = 2**20
# For each failure: a script that fails in this way. It runs in an empty folder, as root if the tests do.
SCRIPTS = {
    "bus error": """
        import mmap
        open("data", "wb").write(bytes(8192))
        file = open("data", "r+b")
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapped[5000]
    """,
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "illegal instruction": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
    "no space": "open('/dev/full', 'w').write('x' * 10**6)",
    "file too large": """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        file = open("checkpoint", "wb", buffering=0)
        while True:
            file.write(bytes(500))
    """,
    "open files": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        files = [open("/dev/null") for _ in range(30)]
    """,
    "host memory": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
        bytearray(2**30)
    """,
    "port in use": """
        import socket
        first = socket.create_server(("127.0.0.1", 0))
        socket.create_server(first.getsockname())
    """,
    "name not found": "import socket; socket.create_connection(('data.invalid', 80))",
    "native library": "open('broken.so', 'wb').write(b'no library'); import sys; sys.path.insert(0, '.'); import broken",
    "import": "from math import nothing_like_it",
    "syntax": "compile('def train(:', 'training_code.py', 'exec')",
    "permission": """
        import os, pathlib
        pathlib.Path("closed").write_text("")
        os.chmod("closed", 0)
        os.getuid() or os.setuid(65534)
        open("closed")
    """,
    "missing file": "open('data/words.bin')",
    "no CUDA": "import torch; torch.zeros(1, device='cuda')",
    "collective timeout": """
        import datetime, os, time
        import torch, torch.distributed as dist
        rank = 0 if os.fork() else 1
        limit = datetime.timedelta(seconds=3)
        dist.init_process_group("gloo", "file://" + os.path.abspath("store"), rank=rank, world_size=2, timeout=limit)
        if rank:
            time.sleep(10)
            os._exit(0)
        dist.all_reduce(torch.ones(1))
    """,
    "peer lost": """
        import os
        import torch, torch.distributed as dist
        rank = 0 if os.fork() else 1
        dist.init_process_group("gloo", "file://" + os.path.abspath("store"), rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        if rank:
            os.kill(os.getpid(), 9)
        while True:
            dist.all_reduce(torch.ones(1))
    """,
    "aborted": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
# Messages of torch built for CUDA, of NCCL, of Docker and of the coordinator. These tests do not cause them.
ERROR_LINES = {
    "GPU memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 18.06 GiB is free.",
    "GPU architecture": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "GPU driver": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    "no GPU": "RuntimeError: No CUDA GPUs are available",
    "GPU assertion": "RuntimeError: CUDA error: device-side assert triggered",
    "GPU fault": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "NCCL": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.28.9",
}
# Faults of the chaos table, of which there are recordings.
RECORDED_FAULTS = {
    "container killed": "a container is killed",
    "node lost": "a machine dies, and comes back after 30 s",
    "unresponsive": "a rank hangs",
}
# Reasons that a real Swarm gives for a task that does not run: the test in tests/lab that expects this message, and the message.
LAB_CASES = {
    "image": ("test_swarm_registry.py", "No such image", ": registry.lab:5000/swarmtrain:0.1"),
    "no node": ("test_swarm_launcher.py", "no suitable node (scheduling constraints not satisfied on 3 nodes)", ""),
    "mount": ("test_swarm_launcher.py", "bind source path does not exist", ": /mnt/data"),
}
# Caused by separate tests below.
SEPARATE_TESTS = {
    "memory": "test_a_process_that_the_kernel_kills_out_of_memory",
    "read-only": "test_a_disk_that_can_only_be_read",
    "shared memory": "test_a_loader_whose_shared_memory_is_full",
}


def build_failure(code: int, stderr: str) -> dict[str, Any]:
    """Return the data that the coordinator receives about a rank that ended like this."""
    if code < 0:
        name = signal.Signals(-code).name
        return {"signal": name, "error": f"killed by {name}"}
    return {"exit_code": code, "error": stderr.strip().splitlines()[-1], "traceback": stderr}


def run_failing_script(script: str, folder: Path, *prefix: str) -> dict[str, Any]:
    lines = [line.removeprefix("        ") for line in script.strip("\n").splitlines()]
    folder.chmod(0o755)
    argv = [*prefix, sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    )
    assert done.returncode != 0
    return build_failure(done.returncode, done.stderr)


def test_each_way_to_fail_is_in_one_group() -> None:
    names = [known.name for known in FAILURE_SIGNATURES]
    assert sorted(names) == sorted([*SCRIPTS, *SEPARATE_TESTS, *LAB_CASES, *RECORDED_FAULTS, *ERROR_LINES])
    assert len(set(names)) == len(names)
    assert all(callable(globals()[test]) for test in SEPARATE_TESTS.values())


def test_the_claim_has_the_numbers_of_these_groups() -> None:
    claim = (
        f"Of the {len(FAILURE_SIGNATURES)} ways to fail that `why` recognizes, {len(SCRIPTS) + len(SEPARATE_TESTS)} happen for real in "
        f"this test, by "
        f"processes that fail in that way; for {len(LAB_CASES)} ({', '.join(LAB_CASES)}) a real Swarm gives the reason in tests/lab, "
        f"and its words are "
        f"recognized here; {len(RECORDED_FAULTS)} ({', '.join(RECORDED_FAULTS)}) are recognized in the recordings of real runs; for "
        f"{len(ERROR_LINES)} ({', '.join(ERROR_LINES)}) only the words of torch, NCCL, Docker or swarmtrain are "
        f"recognized."
    )
    assert claim in " ".join((__doc__ or "").split())


@pytest.mark.parametrize("name", RECORDED_FAULTS)
def test_a_recorded_fault(name: str) -> None:
    diagnosis = diagnose_failure("run", *read_recording(RECORDED_FAULTS[name]), [])
    assert diagnosis is not None
    assert diagnosis.signature == name


def get_failure_name(data: dict[str, Any], output: str = "") -> str:
    found = identify_failure(FailureEvidence(data, output))
    assert found is not None, data
    return found.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_process_that_fails_in_this_way(name: str, tmp_path: Path) -> None:
    assert get_failure_name(run_failing_script(SCRIPTS[name], tmp_path), "what was printed before") == name


@pytest.mark.parametrize("name", ERROR_LINES)
def test_an_error_with_this_message(name: str) -> None:
    assert get_failure_name({"exit_code": 1, "error": ERROR_LINES[name]}) == name
    if "CUDA" in ERROR_LINES[name] or "NCCL" in ERROR_LINES[name]:
        assert get_failure_name({"exit_code": -6, "signal": "SIGABRT", "error": "killed by SIGABRT"}, ERROR_LINES[name]) == name


@pytest.mark.parametrize("name", LAB_CASES)
def test_the_reason_that_a_real_swarm_gives_in_a_test_of_the_lab(name: str) -> None:
    test, words, rest = LAB_CASES[name]
    assert words in (ROOT / "tests" / "lab" / test).read_text()
    assert get_failure_name({"error": words + rest}) == name
    assert get_failure_name({"error": "its container ended"}, words + rest) == name


def test_a_collective_that_nccl_watches() -> None:
    said = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600029 milliseconds"
    assert get_failure_name({"signal": "SIGABRT", "error": "killed by SIGABRT"}, said) == "collective timeout"


def test_an_error_of_the_scripts_own_is_not_explained_by_what_was_printed_before_it(tmp_path: Path) -> None:
    assert (
        identify_failure(
            FailureEvidence(run_failing_script("raise ValueError('no such thing')", tmp_path), "cache: Permission denied, going on")
        )
        is None
    )


def test_a_loader_whose_shared_memory_is_full(tmp_path: Path) -> None:
    if os.getuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip("only root mounts")
    inside = """
        import subprocess
        import torch
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], check=True)
        from torch.utils.data import DataLoader
        for batch in DataLoader(torch.ones(8, 2**20), batch_size=4, num_workers=1):
            print(batch.sum())
    """
    assert get_failure_name(run_failing_script(inside, tmp_path, "unshare", "--mount")) == "shared memory"


def test_a_disk_that_can_only_be_read(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root mounts")
    inside = """
        import os, subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", os.getcwd()], check=True)
        open(os.getcwd() + "/step", "w")
    """
    assert get_failure_name(run_failing_script(inside, tmp_path, "unshare", "--mount")) == "read-only"


@contextmanager
def create_control_group(limit: int) -> Iterator[Path]:
    """Yield a control group of this machine whose members may use `limit` bytes of memory."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"swarmtrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(limit))
    except OSError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def test_a_process_that_the_kernel_kills_out_of_memory(tmp_path: Path) -> None:
    with create_control_group(64 * MIB) as group:
        (tmp_path / "memory").symlink_to(group)
        cgroup = Cgroup(tmp_path if (group / "memory.limit_in_bytes").exists() else group)
        before = cgroup.read_oom_kill_count()
        script = f"open('{group}/cgroup.procs', 'w').write('0'); held = b'x' * {256 * MIB}"
        data = run_failing_script(script, tmp_path)
        assert data["signal"] == "SIGKILL"
        assert (before, cgroup.read_oom_kill_count(), cgroup.read_memory_limit()) == (0, 1, 64 * MIB)
        assert get_failure_name({**data, **describe_out_of_memory(cgroup.read_memory_limit())}) == "memory"
    assert get_failure_name(data) == "killed"


def test_all_fixes_name_settings_that_exist() -> None:
    from swarmtrain.config import Config

    settings = set(
        re.findall(
            r"\b((?:runner|topology|trainer|transformer_architecture)\.[a-z_.]+[a-z_])", " ".join(known.fix for known in FAILURE_SIGNATURES)
        )
    )
    assert len(settings) > 8
    for setting in settings:
        model: Any = Config
        for part in setting.split("."):
            assert part in model.model_fields, setting
            model = model.model_fields[part].annotation
