"""The lab's registry: Debian's docker-registry at the bridge's address, known to every machine as registry.lab:5000.

All labs of this machine share one store on disk (layers are content-addressed, so the registries do not conflict): an image that was
pushed to one lab can be pulled in all of them. The store is removed with the last lab.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import machines, network
from swarmtrain.lab.state import LabDaemon, LabDescription, read_last_log_lines

PORT = 5000
REGISTRY_ADDRESS = f"{network.REGISTRY_HOST}:{PORT}"


def get_image_store_path(labs_folder: Path) -> Path:
    """Return the folder that stores the registry images of all labs under `labs_folder`."""
    return labs_folder / ".images"


def start_registry(description: LabDescription, lab_folder: Path) -> None:
    """Start the lab's registry and wait until it listens. Raises LabError with its log if it does not listen within 1 min."""
    store_path = get_image_store_path(lab_folder.parent)
    store_path.mkdir(exist_ok=True)
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(store_path)}, "delete": {"enabled": True}},
        # All labs use the same secret, because they share the store, including unfinished uploads.
        "http": {"addr": f"{description.bridge_address}:{PORT}", "secret": "lab"},
    }
    (lab_folder / "registry.json").write_text(json.dumps(config))
    daemon, log = LabDaemon(lab_folder / "registry.pid"), lab_folder / "registry.log"
    daemon.spawn(
        ["docker-registry", "serve", str(lab_folder / "registry.json")],
        enter_command=network.build_enter_command(description.name, "bridge"),
        log=log,
    )
    deadline = time.monotonic() + 60  # loading the program from a busy disk takes long
    while PORT not in machines.list_listening_ports(daemon.pid):
        if daemon.pid is None or time.monotonic() > deadline:
            raise LabError(f"the registry does not start:\n{read_last_log_lines(log)}", place="lab")
        time.sleep(0.01)


def stop_registry(lab_folder: Path) -> None:
    """Stop the lab's registry if it is running."""
    LabDaemon(lab_folder / "registry.pid").kill()
