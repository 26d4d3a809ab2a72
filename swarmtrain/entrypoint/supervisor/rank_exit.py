"""How a rank has exited, as the fields of a failure event: a rank that was killed cannot report its death itself."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from swarmtrain.entrypoint.resource_usage import find_container_cgroup


class RankExitDescriber:
    """Describes how ranks have exited. It knows which of them the OOM killer has killed since its creation."""

    def __init__(self) -> None:
        self._cgroup = find_container_cgroup()
        self._oom_kills = self._cgroup.read_oom_kill_count() if self._cgroup else 0

    def describe_exit(self, exit_code: int, error_file: str) -> dict[str, Any]:
        """Return the fields of a failure event.

        `exit_code`: -N if signal N has killed the rank. `error_file`: file of torch's `record`, with the rank's exception.
        """
        if exit_code >= 0:
            return {"exit_code": exit_code, "error": f"exit code {exit_code}", **_read_error_file(error_file)}
        name = format_signal(-exit_code)
        if name == "SIGKILL" and self._cgroup and self._cgroup.read_oom_kill_count() > self._oom_kills:
            self._oom_kills = self._cgroup.read_oom_kill_count()
            return {"signal": name, **describe_out_of_memory(self._cgroup.read_memory_limit())}
        hint = " (out of memory, or killed manually)" if name == "SIGKILL" else ""
        return {"signal": name, "error": f"killed by {name}{hint}"}


def describe_out_of_memory(memory_limit: int | None) -> dict[str, Any]:
    """Return the failure event fields of a rank that the OOM killer killed. `memory_limit`: container memory limit in bytes."""
    memory_scope = f"its container's limit of {memory_limit / 2**30:.2f} GiB" if memory_limit else "the machine's memory"
    return {"error": f"killed by SIGKILL: out of memory within {memory_scope}", "oom": True}


def format_signal(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_error_file(path: str) -> dict[str, Any]:
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        return {"error": message["message"], "traceback": message["extraInfo"]["py_callstack"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
