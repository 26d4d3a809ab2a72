"""A stub of `docker` for hosts without an engine: a container is a process of the host.

As with Docker:
- a requested container is created even if the client is gone;
- what runs in it does not end with the `docker start` that started it (which exits with 0 on SIGTERM, like Docker 28's);
- it sees only the environment variables that were named, and is found by its name.

A volume is not mounted; instead, its target is replaced by its source in the environment variables. Every command is logged to
commands.log in the folder `containers` of the host's state directory. If a file `slow` is there, creating a container takes 3 s.
If a file `empty` is there, images cannot be pulled.
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

STATE_FOLDER = Path(os.environ.get("XDG_STATE_HOME", "/")) / "containers"
FLAGS = {"--rm", "--privileged"}
SLOW_SECONDS = 3.0


def main(argv: list[str]) -> int:
    STATE_FOLDER.mkdir(parents=True, exist_ok=True)
    with (STATE_FOLDER / "commands.log").open("a") as log:
        log.write(" ".join(argv) + "\n")
    match argv:
        case ["version", *_]:
            print("stand-in")
        case [*_, "pull", "--quiet", _] | ["image", "inspect", _] if (STATE_FOLDER / "empty").exists():
            sys.exit("no such manifest")
        case ["--config", folder, "pull", *_]:
            return 0 if "our-login" in (Path(folder) / "config.json").read_text() else 1
        case ["pull", *_]:
            pass
        case ["create", *words]:
            return create_container(words)
        case ["start", "--attach", name]:
            return start_container(name)
        case ["kill", "--signal", "TERM", name]:
            try:
                os.kill(int((STATE_FOLDER / name).read_text()), signal.SIGTERM)
            except (OSError, ValueError):
                return 1
        case ["rm", "--force", name]:
            with contextlib.suppress(OSError, ValueError):
                os.killpg(int((STATE_FOLDER / name).read_text()), signal.SIGKILL)
            for path in (STATE_FOLDER / name, STATE_FOLDER / f"{name}.made"):
                path.unlink(missing_ok=True)
        case _:
            return 125
    return 0


def create_container(arguments: list[str]) -> int:
    options: list[tuple[str, str]] = []
    while arguments[0].startswith("--"):
        flag = arguments.pop(0)
        options.append((flag, "" if flag in FLAGS else arguments.pop(0)))
    name = next(value for option, value in options if option == "--name")
    if (STATE_FOLDER / name).exists():
        print(f"the name {name} is in use", file=sys.stderr)
        return 125
    volumes = [value.split(":")[:2] for option, value in options if option == "--volume"]
    env = {value: os.environ[value] for option, value in options if option == "--env"}
    for source, target in volumes:
        env = {key: value.replace(target, source) for key, value in env.items()}
    image, *rest = arguments
    program = dict(options)["--entrypoint"]
    # The image's own variables.
    env |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(STATE_FOLDER)}
    spec = {"argv": [sys.executable if program == "python3" else program, *rest], "env": env, "broken": image.endswith("/broken")}
    engine = os.fork()
    if engine == 0:
        os.setsid()
        time.sleep(SLOW_SECONDS if (STATE_FOLDER / "slow").exists() else 0)
        (STATE_FOLDER / f"{name}.made").write_text(json.dumps(spec))
        os._exit(0)
    os.waitpid(engine, 0)
    return 0


def start_container(name: str) -> int:
    spec = json.loads((STATE_FOLDER / f"{name}.made").read_text())
    if spec["broken"]:
        print("Error response from daemon: operation not permitted\nError: failed to start containers: " + name, file=sys.stderr)
        return 1
    ranks = subprocess.Popen(spec["argv"], env=spec["env"], start_new_session=True)
    (STATE_FOLDER / name).write_text(str(ranks.pid))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    code = ranks.wait()
    for path in (STATE_FOLDER / name, STATE_FOLDER / f"{name}.made"):
        path.unlink(missing_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
