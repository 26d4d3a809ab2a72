"""The quickstart with its setup: a swarm of three engines on this machine, the image, the training, and the removal of the swarm.

Where a lab cannot run (no root, no Linux), the same job runs as three local nodes.
"""

from __future__ import annotations

import importlib.util
import itertools
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
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import LabError, SwarmtrainError
from swarmtrain.images.project import SHIPPED_FILES as IMAGE_FILES
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.lab.prerequisites import list_missing_packages
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.planner import plan_run
from swarmtrain.launchers.registry import create_launcher
from swarmtrain.operations import runs
from swarmtrain.view.console import ask_confirmation, print_message, show_progress

_NAME, _CONFIG_FILE, _NODE_COUNT = "quickstart", "quickstart.yml", 3
_LAB_NAME = "demo"
_IMAGE = f"{REGISTRY_ADDRESS}/swarmtrain:latest"
_TRAIN_EXTRA_PATTERN = re.compile(r"""extra == ['"]train['"]""")
# Lines of apt-get and pip that show what is being done; their other lines are omitted.
_PROGRESS_LINE_PREFIXES = ("Get:", "Setting up", "Downloading", "Installing")
_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step: it may be unpacking gigabytes


def run_demo(folder: Path, *, use_lab: bool | None, assume_yes: bool) -> int:
    """Train the quickstart in `folder`, and return the exit code. Checkpoints are in its subfolder runs; those of an earlier demo are kept.

    `use_lab`: True fails where a lab cannot run, False uses local nodes, None a lab if possible. Missing packages are installed after a
    confirmation, or at once if `assume_yes`. Raises SwarmtrainError.
    """
    _enter_demo_folder(folder)
    lab = Lab(_LAB_NAME)
    if use_lab is not False and _start_lab(lab, assume_yes=assume_yes, is_required=bool(use_lab)):
        exit_code = _run_demo_on_lab(lab)
    else:
        exit_code = _run_demo_locally(assume_yes=assume_yes)
    if checkpoints := sorted((Path("runs") / _NAME).glob("step-*")):
        _print_heading("the newest checkpoint is in")
        print_message(str(folder / checkpoints[-1]))
    return exit_code


def _enter_demo_folder(folder: Path) -> None:
    """Make `folder` the working folder, since the paths in the config are relative to it, and write the quickstart's files into it.

    The checkpoints of an earlier run are renamed, because the run would resume from them. Raises SwarmtrainError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        checkpoint_folder = Path("runs") / _NAME
        if checkpoint_folder.exists():
            kept_folder = next(path for number in itertools.count(1) if not (path := Path("runs") / f"{_NAME}-{number}").exists())
            checkpoint_folder.rename(kept_folder)
            print_message(f"{folder / checkpoint_folder} exists: renamed to {folder / kept_folder}")
    except OSError as error:
        raise SwarmtrainError(
            f"cannot be used: {describe_os_error(error)}", place=f"demo {folder}", hint="use another folder: swarmtrain demo FOLDER"
        ) from None
    write_shipped_files([_CONFIG_FILE, *TRAINING_FILES])


def _start_lab(lab: Lab, *, assume_yes: bool, is_required: bool) -> bool:
    """Start the lab, and return whether it runs. Raises SwarmtrainError if it `is_required` but cannot run on this machine."""
    try:
        if sys.platform == "linux" and os.geteuid() == 0 and list_missing_packages():
            _install_system_packages(assume_yes=assume_yes)
        lab.check_prerequisites()
        _print_heading(f"starting a swarm of {_NODE_COUNT} engines on this machine")
        lab.bring_up(_NODE_COUNT, shared_folder=Path("runs"), report_progress=print_message)
    except SwarmtrainError as error:
        if is_required:
            raise
        print_message(f"{error}\nthe lab cannot run here: running the same job as {_NODE_COUNT} nodes on this machine")
        return False
    return True


def _install_system_packages(*, assume_yes: bool) -> None:
    packages = list_missing_packages()
    if shutil.which("apt-get") is None:
        raise LabError(f"needs {', '.join(packages)}, and this machine has no apt-get to install them", place="lab")
    _confirm_installation(f"the packages {' '.join(packages)} with apt-get", assume_yes=assume_yes)
    with show_progress(f"installing {', '.join(packages)}") as report_progress:
        _run_installer(["apt-get", "update", "-q"], report_progress)
        _run_installer(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], report_progress)


def _run_demo_on_lab(lab: Lab) -> int:
    try:
        os.environ.update(lab.build_client_environment())
        _print_heading("building the image, and copying it to all machines of the lab")
        engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
        with show_progress(f"building {_IMAGE}") as report_progress:
            images.build_image(engine.client, Path(), _IMAGE, base_image=create_base_image, report_progress=report_progress)
            image = images.distribute_image(
                engine.client, _IMAGE, {}, lambda address: DockerEngine(address).client, report_progress=report_progress
            )
            lab.copy_images(report_progress=report_progress)
        _print_heading(f"deploying {_CONFIG_FILE} on {_NODE_COUNT} nodes")
        return _deploy_and_follow(load_config(_CONFIG_FILE, [f"runner.docker_config.docker_container={image}"]))
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
    pins = f"--constraint={IMAGE_FILES / 'requirements/image.txt'}"
    with show_progress("installing torch") as report_progress:
        _run_installer([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", pins, *requirements], report_progress)
    importlib.invalidate_caches()


def _run_installer(argv: list[str], report_progress: ProgressReporter) -> None:
    def report_line(line: str) -> None:
        if line.lstrip().startswith(_PROGRESS_LINE_PREFIXES):
            report_progress(line.strip())

    process.run_command_with_progress(argv, report_line, env={"DEBIAN_FRONTEND": "noninteractive"})


def _confirm_installation(packages_text: str, *, assume_yes: bool) -> None:
    if not (assume_yes or ask_confirmation(f"install {packages_text}?")):
        raise SwarmtrainError(f"needs {packages_text}", place="demo", hint="confirm the installation, or add --yes")


def _deploy_and_follow(config: Config) -> int:
    launcher = create_launcher(config.runner.runner_type)
    return runs.deploy_and_follow_run(launcher, plan_run(config, _NAME, working_folder=Path.cwd()), assume_yes=True, as_json=False)


def _print_heading(text: str) -> None:
    print_message(f"\n== {text}")
