"""Run programs in processes forked from one that has imported their modules. That saves a start-up time of 0.25 s to 3 s.

This is also the way to run them as a user without read access to our files: the modules are loaded before the user changes.
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


def run_preloaded(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], resource_limits: Mapping[int, int], as_nobody: bool = False, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `swarmtrain ARGUMENTS` or `SCRIPT ARGUMENTS` in its own process. SIGALRM ends it after `timeout` seconds."""
    is_script = argv[0] != "swarmtrain"
    _import_trainer() if is_script else _import_commands()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), errors.fileno())):
                os.dup2(file, number)
            signal.alarm(int(timeout))
            _set_up_child(cwd, env, resource_limits, as_nobody=as_nobody)
            _run_and_exit(argv, is_script=is_script)
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


def _set_up_child(cwd: Path, env: Mapping[str, str], resource_limits: Mapping[int, int], *, as_nobody: bool) -> None:
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115  # streams, not files
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))  # an interpreter reads the variable only at its start
    atexit._clear()  # drop the exit handlers of the tests' process
    for kind, limit in resource_limits.items():
        resource.setrlimit(kind, (limit, limit))
    if as_nobody and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _run_and_exit(argv: Sequence[str], *, is_script: bool) -> NoReturn:
    sys.argv = list(argv)
    code = 1
    try:
        if is_script:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_path(argv[0], run_name="__main__")
            code = 0
        else:
            importlib.import_module("swarmtrain.__main__").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:  # noqa: BLE001  # print it like the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
