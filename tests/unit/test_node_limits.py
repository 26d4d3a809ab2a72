"""A node raises its own limits, so that the defaults of an engine do not limit the ranks."""

from __future__ import annotations

import resource
import subprocess
import sys

PROGRAM = """
import resource
from swarmtrain.process import raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
raise_open_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_supervisor_raises_the_soft_limit_of_open_files_to_the_hard_limit() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    hard_limit = str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert done.stdout.split() == [hard_limit, hard_limit]
