"""The images of a lab's engines, as folders that can be copied as hard links: in seconds, without a registry and a second copy on the disk.

Engines replace the files of their images, and never modify them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarmtrain.lab import engine_api, engines
from swarmtrain.process import run_command


def copy_image_store(lab_folder: Path, source: str, target: str) -> None:
    """Replace the images and containers of the engine of `target`, which is powered off, by the images of `source`."""
    for name in list_image_folders(lab_folder, source):
        copy_with_hard_links(get_data_folder(lab_folder, source) / name, get_data_folder(lab_folder, target) / name)


def get_data_folder(lab_folder: Path, node: str) -> Path:
    """Return the folder with the data of the node's engine."""
    return lab_folder / node / "data"


def list_image_folders(lab_folder: Path, node: str) -> list[str]:
    """Return the names of the folders in the data of the node's running engine that have its images."""
    return ["image", str(engine_api.send_request(engines.get_engine_socket(lab_folder, node), "GET", "/info")["Driver"])]


def copy_with_hard_links(source: Path, target: Path) -> None:
    """Replace the folder `target` by a copy of `source` as hard links, without what is mounted in it; on another disk, as a real copy."""
    run_command(["rm", "-rf", str(target)])
    target.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["cp", "-alx", str(source), str(target)], stderr=subprocess.DEVNULL, check=False).returncode:
        run_command(["rm", "-rf", str(target)])
        run_command(["cp", "-ax", str(source), str(target)])
