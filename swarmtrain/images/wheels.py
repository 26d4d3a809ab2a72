"""Download and build the wheels that go into an image, in advance, so that the image build itself needs no network."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import ImageError, ProcessError
from swarmtrain.images.image_client import ProgressReporter
from swarmtrain.images.project import Project, find_source_checkout

PYTHON_VERSION = "3.11"
"""The Python version of the base image."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Name of a processor architecture in wheel tags, by its name in the Docker engine."""
# Files that pip adds to the files of a wheel when it installs the wheel.
_PIP_METADATA_FILES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
_MANYLINUX_VERSIONS = ("_2_36", "_2_28", "_2_27", "_2_26", "_2_17", "2014")


def download_pinned_wheels(project: Project, machine: str, *, report_progress: ProgressReporter) -> None:
    """Download the wheels of the project's pins into the project's wheel folder, for the processor architecture `machine`.

    Every file except torch's is checked against the lock file. Nothing is downloaded while the pins are unchanged. Raises ImageError if pip
    fails.
    """
    lock_bytes = project.lock.read_bytes() if project.lock else b""
    stamp = _compute_inputs_digest(project.pins.read_bytes(), lock_bytes, machine)
    if _is_wheel_folder_complete(project.wheel_folder, stamp):
        return
    report_progress(f"downloading wheels to {project.wheel_folder}")
    if not lock_bytes:
        report_progress(f"{project.pins} has no image.lock: hashes are not checked; swarmtrain image lock writes one")
    shutil.rmtree(project.wheel_folder, ignore_errors=True)
    if project.lock:
        download_wheels(project.wheel_folder, machine, "--no-deps", "--require-hashes", f"--requirement={project.lock}")
    else:
        download_wheels(project.wheel_folder, machine, "--no-deps", f"--requirement={project.pins}")
    report_progress("downloading torch")
    # Include the dependencies of the index's torch build: a CUDA build depends on NVIDIA's libraries.
    download_wheels(project.wheel_folder, machine, f"--find-links={project.wheel_folder}", f"--constraint={project.pins}", "torch")
    _get_stamp_file_path(project.wheel_folder).write_text(stamp)


def can_compile_for_gpus(wheel_folder: Path) -> bool:
    """Return whether torch's wheel in `wheel_folder` supports GPUs. It then brings Triton, which needs a C++ compiler while training."""
    return any(wheel_folder.glob("triton-*.whl"))


def download_extra_wheels(project: Project, machine: str, *, report_progress: ProgressReporter) -> None:
    """Download the additional wheels for the project's requirements.txt into the project's extra wheel folder, for `machine`.

    Raises ImageError if the download fails.
    """
    if project.requirements is None:
        shutil.rmtree(project.extra_wheel_folder, ignore_errors=True)
        return
    stamp = _compute_inputs_digest(project.requirements.read_bytes(), project.pins.read_bytes(), machine)
    if _is_wheel_folder_complete(project.extra_wheel_folder, stamp):
        return
    report_progress(f"downloading the packages that {project.requirements} lists to {project.extra_wheel_folder}")
    shutil.rmtree(project.extra_wheel_folder, ignore_errors=True)
    pinned_options = f"--find-links={project.wheel_folder}", f"--constraint={project.pins}"
    download_wheels(project.extra_wheel_folder, machine, *pinned_options, f"--requirement={project.requirements}")
    for wheel in project.extra_wheel_folder.glob("*.whl"):
        if (project.wheel_folder / wheel.name).exists():
            wheel.unlink()
    _get_stamp_file_path(project.extra_wheel_folder).write_text(stamp)


def build_swarmtrain_wheel(output_folder: Path, *, report_progress: ProgressReporter) -> None:
    """Write swarmtrain's own wheel into `output_folder`, and remove everything else from it. Raises ImageError if pip fails.

    The wheel is built from the running checkout or, since no package index has swarmtrain, from the installed files. So the nodes get the
    same version as this machine.
    """
    shutil.rmtree(output_folder, ignore_errors=True)
    output_folder.mkdir(parents=True)
    if checkout_folder := find_source_checkout():
        report_progress(f"building swarmtrain's wheel from {checkout_folder}")
        # Works without a package index if the build backend is installed already.
        isolation_options = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
        _run_pip("wheel", "--no-deps", *isolation_options, f"--wheel-dir={output_folder}", str(checkout_folder))
    else:
        report_progress("building swarmtrain's wheel from the installed package")
        repack_installed_wheel("swarmtrain", output_folder)


def repack_installed_wheel(name: str, output_folder: Path) -> None:
    """Write the wheel of the installed pure-Python package `name`, rebuilt from its files, into `output_folder`.

    The result is byte-identical for equal files.
    """
    distribution = metadata.distribution(name)
    files = [
        file
        for file in distribution.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in _PIP_METADATA_FILES
    ]
    with zipfile.ZipFile(output_folder / f"{distribution.name}-{distribution.version}-py3-none-any.whl", "w") as wheel:
        for file in sorted(files):
            wheel.writestr(zipfile.ZipInfo(str(file)), file.read_binary())
        record = next(str(file) for file in distribution.files or () if file.name == "RECORD")
        wheel.writestr(zipfile.ZipInfo(record), "".join(f"{file},,\n" for file in sorted(files)))


def download_wheels(output_folder: Path, machine: str, *pip_arguments: str) -> None:
    """Download the wheels that `pip download` selects for `pip_arguments`, for the image's Python version on `machine`, to `output_folder`.

    Raises ImageError if pip fails.
    """
    output_folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{version}_{machine}" for version in _MANYLINUX_VERSIONS]
    _run_pip("download", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}", *platforms, f"--dest={output_folder}", *pip_arguments)


def _compute_inputs_digest(*inputs: bytes | str) -> str:
    return hashlib.sha256(
        "\0".join([PYTHON_VERSION, *(item if isinstance(item, str) else item.hex() for item in inputs)]).encode()
    ).hexdigest()


def _is_wheel_folder_complete(folder: Path, stamp: str) -> bool:
    return _get_stamp_file_path(folder).exists() and _get_stamp_file_path(folder).read_text() == stamp


def _get_stamp_file_path(folder: Path) -> Path:
    return folder / ".complete"


def _run_pip(*arguments: str) -> None:
    try:
        process.run_command([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    except ProcessError as error:
        raise ImageError(error.message, place="image wheels", hint=_suggest_pip_fix(error.output)) from None


def _suggest_pip_fix(output: str) -> str:
    if "No module named pip" in output:
        return f"{sys.executable} -m ensurepip"
    if "ResolutionImpossible" in output or "conflicting dependencies" in output:
        return (
            "request the version above, since an image has one version of each package, or add your own "
            "requirements/image.txt to the folder"
        )
    if "DO NOT MATCH THE HASHES" in output:
        return "check the package index with pip config list: it served a different file than the pinned one"
    return "check with pip config list that a package index is reachable"
