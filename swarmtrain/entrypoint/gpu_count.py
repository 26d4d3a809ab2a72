"""Number of GPUs that the ranks of this node can use, compared with the number that the plan assumes. Standard library only."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from swarmtrain.errors import ProcessError
from swarmtrain.process import run_command
from swarmtrain.protocol import ENV_GPUS, ENV_SIMULATED_GPUS

_DRIVER_FOLDER = Path("/proc/driver/nvidia")
_NVIDIA_SMI_TIMEOUT_SECONDS = 60.0  # without the persistence daemon, it initializes each GPU
_UUID_PATTERN = re.compile(r"^GPU \d+: .*\(UUID: (\S+)\)")
_MIG_PATTERN = re.compile(r"^\s+MIG ", re.MULTILINE)
_DEVICE_FILE_PATTERN = "nvidia[0-9]*"
_FOREIGN_DEVICE_FILES = ("kfd", "dxg")
"""Device files of GPUs that only other tools than nvidia-smi can count: those of AMD, and those of Windows in WSL."""


def find_gpu_count_problem(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> str:
    """Return why the GPUs of this node are not those that the plan assumes, with both numbers; empty if they are, or are not counted."""
    assumed_text = environ.get(ENV_GPUS, "")
    if not assumed_text or ENV_SIMULATED_GPUS in environ:
        return ""
    assumed, may_have_more = int(assumed_text.rstrip("+")), assumed_text.endswith("+")
    count, reason = count_usable_gpus(environ, device_folder)
    if count is None or count == assumed or (may_have_more and count > assumed):
        return ""
    hint = "run swarmtrain doctor CONFIG, which shows the GPUs of each node, and deploy again"
    return f"finds {_format_gpu_count(count)}{reason}, but the slots of the plan assume {assumed}: {hint}"


def find_unused_gpu_warnings(environ: Mapping[str, str], driver_folder: Path = _DRIVER_FOLDER) -> list[str]:
    """Return a warning if the container hides the GPUs of its machine: the config says none, or the plan did not know of them."""
    count = len(list_machine_gpus(driver_folder)) if environ.get("NVIDIA_VISIBLE_DEVICES") == "void" else 0
    if not count:
        return []
    return [f"this machine has {_format_gpu_count(count)}, but the run uses none; swarmtrain doctor CONFIG shows what to set"]


def list_machine_gpus(driver_folder: Path = _DRIVER_FOLDER) -> list[str]:
    """Return the UUIDs of the machine's GPUs from the driver's folder, which is visible in a container unless its runtime hides it."""
    uuids = []
    for path in sorted(driver_folder.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            uuids += [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("GPU UUID")]
    return uuids


def count_usable_gpus(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> tuple[int | None, str]:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES leaves of those in this container, and a remark on it.

    None for GPUs that cannot be counted: parts of a GPU (MIG), and GPUs that nvidia-smi does not list.
    """
    if shutil.which("nvidia-smi") is None:
        if any((device_folder / name).exists() for name in _FOREIGN_DEVICE_FILES):
            return None, ""
        devices = len(list(device_folder.glob(_DEVICE_FILE_PATTERN)))
        return devices, "" if devices else " (no NVIDIA device or nvidia-smi in its container)"
    try:
        listing = run_command(["nvidia-smi", "-L"], timeout=_NVIDIA_SMI_TIMEOUT_SECONDS)
    except ProcessError as error:
        return 0, f" (nvidia-smi: {(error.output.strip() or f'exit code {error.returncode}').splitlines()[-1]})"
    if _MIG_PATTERN.search(listing):
        return None, ""
    return _count_selected_gpus([match[1] for line in listing.splitlines() if (match := _UUID_PATTERN.match(line))], environ), ""


def _count_selected_gpus(uuids: list[str], environ: Mapping[str, str]) -> int:
    """Return how many of the GPUs CUDA_VISIBLE_DEVICES selects. As in CUDA, the entries after an unknown one do not count."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return len(uuids)
    count = 0
    for entry in environ["CUDA_VISIBLE_DEVICES"].split(","):
        is_known = int(entry) < len(uuids) if entry.isdigit() else bool(entry) and any(uuid.startswith(entry) for uuid in uuids)
        if not is_known:
            break
        count += 1
    return count


def _format_gpu_count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
