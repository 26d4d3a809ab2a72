"""The quickstart with its setup: a swarm of three engines on this machine, the image, the training, and the removal of the swarm.

Where a lab cannot run (no root, no Linux), the same job runs as three local nodes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from swarmtrain import images, process
from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.config.starter_files import TRAINING_FILES, write_shipped_files
from swarmtrain.errors import LabError, SwarmtrainError
from swarmtrain.images.project import SHIPPED_FILES as IMAGE_FILES
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.lab.prerequisites import ENGINE_PACKAGES, list_missing_packages
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.planner import plan_run
from swarmtrain.launchers.registry import create_launcher
from swarmtrain.operations import runs
from swarmtrain.view.console import ask_confirmation, print_message, show_progress

_NAME, _CONFIG_FILE, _NODE_COUNT = "quickstart", "quickstart.yml", 3
_LAB_NAME = "demo"
_IMAGE = f"{REGISTRY_ADDRESS}/swarmtrain:latest"
_TRAIN_EXTRA_PATTERN = re.compile(r"""extra == ['"]train['"]""")
_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step: it may be unpacking gigabytes


def run_demo(folder: Path, *, use_lab: bool | None, assume_yes: bool) -> int:
    """Train the quickstart in `folder`, and return the exit code. Checkpoints are in its subfolder runs, which a new demo empties.

    `use_lab`: True fails where a lab cannot run, False uses local nodes, None a lab if possible. Missing packages are installed after a
    confirmation, or at once if `assume_yes`. Raises SwarmtrainError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the paths in the config are relative to the working folder
    write_shipped_files([_CONFIG_FILE, *TRAINING_FILES])
    shutil.rmtree(Path("runs") / _NAME, ignore_errors=True)
    lab = Lab(_LAB_NAME)
    if use_lab is not False and _is_lab_possible(lab, assume_yes=assume_yes, is_required=bool(use_lab)):
        exit_code = _run_demo_on_lab(lab)
    else:
        exit_code = _run_demo_locally(assume_yes=assume_yes)
    if checkpoints := sorted((Path("runs") / _NAME).glob("step-*")):
        _print_heading("the newest checkpoint is in")
        print_message(str(folder / checkpoints[-1]))
    return exit_code


def _is_lab_possible(lab: Lab, *, assume_yes: bool, is_required: bool) -> bool:
    try:
        if sys.platform == "linux" and os.geteuid() == 0 and list_missing_packages():
            _install_system_packages(assume_yes=assume_yes)
        lab.check_prerequisites()
    except SwarmtrainError as error:
        if is_required:
            raise
        print_message(f"{error}\nthe lab cannot run here: running the same job as {_NODE_COUNT} nodes on this machine")
        return False
    return True


def _install_system_packages(*, assume_yes: bool) -> None:
    if shutil.which("apt-get") is None:
        raise LabError(f"needs {', '.join(list_missing_packages())}, and this machine has no apt-get to install them", place="lab")
    _confirm_installation(f"the packages {' '.join(ENGINE_PACKAGES)} with apt-get", assume_yes=assume_yes)
    with show_progress(f"installing {', '.join(ENGINE_PACKAGES)}"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        process.run_command(["apt-get", "update", "-q"], env=environment)
        process.run_command(["apt-get", "install", "-y", "-q", "--no-install-recommends", *ENGINE_PACKAGES], env=environment)


def _run_demo_on_lab(lab: Lab) -> int:
    _print_heading(f"starting a swarm of {_NODE_COUNT} engines on this machine")
    lab.bring_up(_NODE_COUNT, shared_folder=Path("runs"), report_progress=print_message)
    try:
        os.environ.update(lab.build_client_environment())
        _print_heading("building the image and pushing it to the lab's registry")
        engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
        with show_progress(f"building {_IMAGE}") as report_progress:
            images.build_image(engine.client, Path(), _IMAGE, report_progress=report_progress)
            images.push_image(engine.client, _IMAGE, report_progress=report_progress)
        _print_heading(f"deploying {_CONFIG_FILE} on {_NODE_COUNT} nodes")
        return _deploy_and_follow(load_config(_CONFIG_FILE))
    finally:
        _print_heading("removing the lab")
        lab.tear_down(keep_images=True, report_progress=print_message)


def _run_demo_locally(*, assume_yes: bool) -> int:
    if importlib.util.find_spec("torch") is None:
        _install_training_packages(assume_yes=assume_yes)
    _print_heading(f"deploying {_CONFIG_FILE} on {_NODE_COUNT} local nodes")
    config = load_config(_CONFIG_FILE, ["runner.runner_type=local"])
    try:
        return _deploy_and_follow(config)
    finally:
        launcher = create_launcher(config.runner.runner_type)
        if _NAME in launcher.list_runs():
            runs.remove_run(launcher, _NAME)


def _install_training_packages(*, assume_yes: bool) -> None:
    requirements = [text.partition(";")[0] for text in metadata.requires("swarmtrain") or () if _TRAIN_EXTRA_PATTERN.search(text)]
    _confirm_installation("torch and the other training packages into this Python environment with pip", assume_yes=assume_yes)
    with show_progress("installing torch"):
        pins = f"--constraint={IMAGE_FILES / 'requirements/image.txt'}"
        process.run_command([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pins, *requirements])
    importlib.invalidate_caches()


def _confirm_installation(packages_text: str, *, assume_yes: bool) -> None:
    if not (assume_yes or ask_confirmation(f"install {packages_text}?")):
        raise SwarmtrainError(f"needs {packages_text}", place="demo", hint="confirm the installation, or add --yes")


def _deploy_and_follow(config: Config) -> int:
    launcher = create_launcher(config.runner.runner_type)
    runs.deploy_run(launcher, plan_run(config, _NAME, working_folder=Path.cwd()), assume_yes=True)
    return runs.follow_run(launcher, _NAME, as_json=False)


def _print_heading(text: str) -> None:
    print_message(f"\n== {text}")
