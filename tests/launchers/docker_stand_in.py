"""Stands in for `docker` on the hosts of a test, where no engine is: a container is a process of the host's own.

As with Docker, a container that is asked for is made even if whoever asked has gone, what runs in it does not end with the
`docker start` that started it (which ends at SIGTERM, with 0, as that of Docker 28), sees of its variables only those that were
named, and is found again by its name. A volume is not mounted; its target is written as its source in the variables instead. What
was asked is written down beside the state of the host, where a file `slow` makes it take seconds until a container is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("XDG_STATE_HOME", "/")) / "containers"
FLAGS = {"--rm", "--privileged"}
SLOW = 3.0


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
        case ["create", *words]:
            return create(words)
        case ["start", "--attach", name]:
            return start(name)
        case ["kill", "--signal", "TERM", name]:
            try:
                os.kill(int((STATE / name).read_text()), signal.SIGTERM)
            except (OSError, ValueError):
                return 1
        case ["rm", "--force", name]:
            with contextlib.suppress(OSError, ValueError):
                os.killpg(int((STATE / name).read_text()), signal.SIGKILL)
            for path in (STATE / name, STATE / f"{name}.made"):
                path.unlink(missing_ok=True)
        case _:
            return 125
    return 0


def create(words: list[str]) -> int:
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
    program = dict(options)["--entrypoint"]
    # The image's own.
    env |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(STATE)}
    made = {"argv": [sys.executable if program == "python3" else program, *rest], "env": env, "broken": image.endswith("/broken")}
    engine = os.fork()
    if engine == 0:
        os.setsid()
        time.sleep(SLOW if (STATE / "slow").exists() else 0)
        (STATE / f"{name}.made").write_text(json.dumps(made))
        os._exit(0)
    os.waitpid(engine, 0)
    return 0


def start(name: str) -> int:
    made = json.loads((STATE / f"{name}.made").read_text())
    if made["broken"]:
        print("Error response from daemon: operation not permitted\nError: failed to start containers: " + name, file=sys.stderr)
        return 1
    ranks = subprocess.Popen(made["argv"], env=made["env"], start_new_session=True)
    (STATE / name).write_text(str(ranks.pid))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    code = ranks.wait()
    for path in (STATE / name, STATE / f"{name}.made"):
        path.unlink(missing_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
