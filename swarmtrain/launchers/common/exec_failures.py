"""Recognizes containers whose program the kernel cannot start: engines restart them, although the next attempt fails in the same way.

Their agent never runs, so that the coordinator does not hear of them and counts no restart. The exit code alone does not show it.
"""

from __future__ import annotations

import re

from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine

MAX_EXEC_FAILURES = 5
EXEC_HINT = "check that the image is built for the machine's architecture, and shorten long values in runner.env"
# The engine's message in the log of such a container.
_MESSAGE_PATTERN = re.compile(
    r"exec /\S+: (argument list too long|exec format error|no such file or directory|permission denied)|"
    r"standard_init_linux\.go:\d+: exec user process caused: .+"
)


def read_exec_failure(engine: DockerEngine, api_path: str, node: str, attempts: int = MAX_EXEC_FAILURES) -> str:
    """Return the engine's message if the last `attempts` lines of the log of `api_path` are such messages; empty if not.

    Raises EngineError if the engine does not answer.
    """
    lines = [line.text.strip() for line in container_logs.read_log_lines(engine, api_path, node, tail=attempts)]
    return lines[-1] if lines and all(map(_MESSAGE_PATTERN.fullmatch, lines)) else ""
