"""Stands in for `docker` on the hosts of a test, where no engine is: `run` starts the command as a process of the host's own.

As with Docker, what runs in the container does not end with the `docker run` that started it, hears the signals that this gets, sees
of its variables only those that were named, and is found again by its name. A volume is not mounted; its target is written as its
source in the variables instead. What was asked is written down beside the state of the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["XDG_STATE_HOME"]) / "containers"
FLAGS = {"--rm", "--privileged"}


def main(argv: list[str]) -> int:
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "asked").open("a") as asked:
        asked.write(" ".join(argv) + "\n")
    match argv:
        case ["version", *_]:
            print("stand-in")
        case ["--config", folder, "pull", *_]:
            return 0 if "our-login" in (Path(folder) / "config.json").read_text() else 1
        case ["pull", *_]:
            pass
        case ["run", *words]:
            return run(words)
        case ["rm", "--force", name]:
            with contextlib.suppress(OSError):
                os.killpg(int((STATE / name).read_text()), signal.SIGKILL)
            (STATE / name).unlink(missing_ok=True)
        case _:
            return 125
    return 0


def run(words: list[str]) -> int:
    options: list[tuple[str, str]] = []
    while words[0].startswith("--"):
        flag = words.pop(0)
        options.append((flag, "" if flag in FLAGS else words.pop(0)))
    name = next(value for option, value in options if option == "--name")
    if (STATE / name).exists():
        print(f"the name {name} is in use", file=sys.stderr)
        return 125
    volumes = [value.split(":")[:2] for option, value in options if option == "--volume"]
    env = {value: os.environ[value] for option, value in options if option == "--env"}
    for source, target in volumes:
        env = {key: value.replace(target, source) for key, value in env.items()}
    image, *rest = words
    if image.endswith("/broken"):
        print("docker: Error response from daemon: operation not permitted", file=sys.stderr)
        return 125
    program = dict(options)["--entrypoint"]
    # The image's own.
    env |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(STATE)}
    ranks = subprocess.Popen([sys.executable if program == "python3" else program, *rest], env=env, start_new_session=True)
    (STATE / name).write_text(str(ranks.pid))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ranks.send_signal(number))
    code = ranks.wait()
    (STATE / name).unlink(missing_ok=True)
    return code


sys.exit(main(sys.argv[1:]))
