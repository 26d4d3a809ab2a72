"""The modules that are sent to hosts over SSH run on Python 3.8, the oldest that hosts of containers may have."""

from __future__ import annotations

import ast
import io
import json
import os
import pwd
import re
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from swarmtrain.launchers.ssh.host_connections import _AGENT_BOOTSTRAP, _build_agent_archive

# Names of the standard library that Python 3.8 lacks. Older interpreters report them only when a line with one of them runs.
NEWER_NAMES = (
    *("UTC", "StrEnum", "TaskGroup", "tomllib", "zoneinfo", "graphlib", "batched", "pairwise"),
    *("removeprefix", "removesuffix", "readlink", "is_relative_to", "with_stem", "hardlink_to", "randbytes", "bit_count"),
    *("waitstatus_to_exitcode", "pidfd_open", "pidfd_send_signal", "to_thread", "cache", "file_digest", "process_group"),
)
NEWER_KEYWORDS = ("slots", "kw_only", "strict", "process_group")


def read_agent_sources() -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(_build_agent_archive())) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def find_newer_names(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source, feature_version=(3, 8))):
        if isinstance(node, ast.Attribute) and node.attr in NEWER_NAMES and ast.unparse(node) != "os.readlink":
            found.append(node.attr)
        elif isinstance(node, ast.alias) and node.name in NEWER_NAMES:
            found.append(node.name)
        elif isinstance(node, ast.keyword) and node.arg in NEWER_KEYWORDS:
            found.append(f"{node.arg}=")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(node.left, ast.Dict | ast.DictComp):
            found.append("dict | dict")
    return found


def find_oldest_interpreter() -> str:
    """Return a Python 3.8 of this machine; the interpreter of this test if there is none."""
    pyenv_versions = Path(pwd.getpwuid(os.getuid()).pw_dir, ".pyenv", "versions")
    installed = [*Path("/usr/bin").glob("python3.8"), *pyenv_versions.glob("3.8.*/bin/python3.8")]
    return str(installed[0]) if installed else sys.executable


def exchange_requests(requests: list[list[Any]], state_home: Path) -> list[Any]:
    """Send `requests` to an agent under the oldest interpreter, as over SSH, and return the answers."""
    archive = _build_agent_archive()
    header = {"size": len(archive), "digest": sha256(archive).hexdigest()[:16], "host": "old"}
    sent = json.dumps(header).encode() + b"\n" + archive + b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    done = subprocess.run(
        [find_oldest_interpreter(), "-I", "-c", _AGENT_BOOTSTRAP],
        input=sent,
        capture_output=True,
        env={**os.environ, "XDG_STATE_HOME": str(state_home)},
        check=True,
    )
    replies = [json.loads(line) for line in done.stdout.decode().splitlines()[1:]]
    assert not [reply for reply in replies if "error" in reply], replies
    return [reply["answer"] for reply in replies]


def test_the_agent_uses_only_syntax_and_names_of_python_3_8() -> None:
    sources = read_agent_sources()
    assert len(sources) > 8
    assert {name: found for name, source in sources.items() if (found := find_newer_names(source))} == {}
    annotated = [name for name, source in sources.items() if re.search(r"-> |: \w+ \| ", source)]
    assert [name for name in annotated if "from __future__ import annotations" not in sources[name]] == []


def test_the_agent_runs_a_process_on_the_oldest_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / "swarmtrain" / ".hosts" / "old" / "demo"
    log = str(folder / "node0.log")
    spec = {"name": "node0", "argv": ["echo", "hello"], "env": {}, "cwd": "/", "stdout": log, "stderr": log, "content_digest": ""}
    host, *_, processes = exchange_requests(
        [
            ["describe_host", {"ports": [1]}],
            ["lock_run", {"run": "demo", "owner": "test"}],
            ["write_files", {"run": "demo", "files": {"code/a.py": ["", 0o644], "local.json": ["e30=", 0o600]}}],
            ["start_processes", {"run": "demo", "specs": [spec]}],
            ["stop_processes", {"run": "demo", "names": ["node1"], "grace": 1.0}],
            ["unlock_run", {"run": "demo"}],
            ["poll_changes", {"run": "demo", "offsets": {"node0.log": 0}, "wait_seconds": 20.0}],
        ],
        tmp_path,
    )
    assert host["python"].startswith("3.")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z hello", processes["files"]["node0.log"])
