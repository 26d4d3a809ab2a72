"""The lab's registry: Debian's docker-registry at the bridge's address, known to every machine as registry.lab:5000.

All labs of this machine share one store on disk (layers are named by their content, so the registries do not get in
each other's way): an image that was pushed to one lab can be pulled in all of them. It goes with the last lab.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import fabric, machines
from swarmtrain.lab.state import Daemon, Description, tail

PORT = 5000
REGISTRY = f"{fabric.REGISTRY_HOST}:{PORT}"


def store(base: Path) -> Path:
    """Return the directory of the images of all labs under `base`."""
    return base / ".images"


def start(description: Description, directory: Path) -> None:
    """Start the lab's registry and return when it listens. Raises LabError with its log if it does not within a minute."""
    images = store(directory.parent)
    images.mkdir(exist_ok=True)
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(images)}, "delete": {"enabled": True}},
        # The same secret in all labs: they share the store, unfinished uploads included.
        "http": {"addr": f"{description.bridge_address}:{PORT}", "secret": "lab"},
    }
    (directory / "registry.json").write_text(json.dumps(config))
    daemon, log = Daemon(directory / "registry.pid"), directory / "registry.log"
    daemon.spawn(["docker-registry", "serve", str(directory / "registry.json")], enter=fabric.enter(description.name, "fabric"), log=log)
    deadline = time.monotonic() + 60  # a disk that is busy takes long to read the program
    while PORT not in machines.listening(daemon.pid):
        if daemon.pid is None or time.monotonic() > deadline:
            raise LabError(f"the registry does not start:\n{tail(log)}", place="lab")
        time.sleep(0.01)


def stop(directory: Path) -> None:
    """Stop the lab's registry, if it runs."""
    Daemon(directory / "registry.pid").kill()
