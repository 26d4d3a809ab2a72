"""Programs in processes forked from one that has imported what they need: the same, without a start of a quarter second, or of three.

Also the way to run one as a user who may read nothing of ours: the modules are there before that user is.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pkgutil
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

NOBODY = 65534


def run(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], limits: Mapping[int, int], nobody: bool = False, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `swarmtrain ARGUMENTS` or `SCRIPT ARGUMENTS` as a process of its own; SIGALRM ends it after `timeout` seconds."""
    script = argv[0] != "swarmtrain"
    _import_trainer() if script else _import_commands()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), errors.fileno())):
                os.dup2(file, number)
            signal.alarm(int(timeout))
            _become(cwd, env, limits, nobody=nobody)
            _end(argv, script=script)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(argv), code, *texts)


@cache
def _import_commands() -> None:
    for name in ("docker", "requests", "yaml", "rich.console", "rich.markup"):
        importlib.import_module(name)
    for part in ("cli", "view", "launchers", "images", "render", "config", "lab"):
        package = importlib.import_module(f"swarmtrain.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


@cache
def _import_trainer() -> None:
    importlib.import_module("swarmtrain.trainer")
    assert threading.active_count() == 1, "a thread of this process would be missing in those forked from it"


def _become(cwd: Path, env: Mapping[str, str], limits: Mapping[int, int], *, nobody: bool) -> None:
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115  # streams, not files
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))  # read when an interpreter starts
    atexit._clear()  # what the tests' own process is to do at its end
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    if nobody and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _end(argv: Sequence[str], *, script: bool) -> NoReturn:
    sys.argv = list(argv)
    code = 1
    try:
        if script:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_path(argv[0], run_name="__main__")
            code = 0
        else:
            importlib.import_module("swarmtrain.__main__").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:  # noqa: BLE001  # as the interpreter would tell it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
