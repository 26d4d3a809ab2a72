"""Run report: the environment of a run, written at each start and restart.

The full report is written to report.json in the run's folder, a summary to the log, and one entry per node is posted to the coordinator.
The report includes only those environment variables that configure devices and communication. For the variables in the config's `env` it
includes only the names, since the values may be confidential.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import swarmtrain
from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.trainer import collectives
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
FILE_NAME = "report.json"
_REPORTED_VARIABLES = re.compile(
    r"(NCCL|GLOO|TP|UCX|TORCH_NCCL)_|(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_((CUDA|HIP)_)?ALLOC_CONF)$"
)
_DRIVER_VERSION_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
_MAX_NODES_LOGGED = 8
ReportFields = dict[str, Any]


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs, on which device, and its coordinates in the mesh."""

    rank: int
    node: str
    host: str
    local_rank: int
    device: str
    uuid: str
    """UUID of the GPU; empty for a CPU."""
    driver: str
    pipe_rank: int
    tensor_rank: int
    data_rank: int


def gather_run_report(runtime: Runtime, generation: int, parameter_count: int, mesh: Mesh | None) -> ReportFields:
    """Gather the placement of all ranks, and return the run report. Collective: all ranks must call it.

    `generation`: generation of the current world. `mesh`: mesh of the model; None for a custom script, whose batches
    have no known number of tokens.
    """
    placements = collectives.all_gather_values(asdict(_collect_rank_placement(runtime, mesh)))
    tokens_per_step = runtime.config.topology.samples_per_step * runtime.config.transformer_architecture.sequence_length if mesh else None
    config = runtime.config.model_dump(mode="json")
    config["runner"]["env"] = dict.fromkeys(config["runner"].get("env") or {}, "…")
    environment = {name: value for name, value in sorted(os.environ.items()) if _REPORTED_VARIABLES.match(name)}
    return {
        "run": runtime.run_name,
        "generation": generation,
        "time": time.time(),
        "parameters": parameter_count,
        **({"tokens_per_step": tokens_per_step} if tokens_per_step else {}),
        "versions": _collect_versions(placements[0]["driver"]),
        "communication": {"backend": "nccl and gloo" if runtime.device.type == "cuda" else "gloo", "environment": environment},
        "ranks": placements,
        "config": config,
    }


def write_run_report(report: ReportFields, folder: Path) -> None:
    """Write `report` to report.json in `folder`, replacing the previous report. If the folder is not writable, only log a warning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / FILE_NAME, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        LOG.warning("%s: cannot be written: %s", folder / FILE_NAME, describe_os_error(error))


def format_report_summary(report: ReportFields) -> Iterator[str]:
    """Yield the lines of the report's summary for the log."""
    versions, environment = report["versions"], report["communication"]["environment"]
    interface = environment.get("NCCL_SOCKET_IFNAME", environment.get("GLOO_SOCKET_IFNAME", "")).lstrip("=")
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"ranks communicate via {report['communication']['backend']}{f' over {interface}' if interface else ''}"
    nodes = list(summarize_nodes(report))
    for node, node_fields in nodes[:_MAX_NODES_LOGGED]:
        yield f"{node}: {node_fields['host']}, ranks {node_fields['ranks']}, {node_fields['devices']}"
    if len(nodes) > _MAX_NODES_LOGGED:
        yield f"and {len(nodes) - _MAX_NODES_LOGGED} more nodes, see {FILE_NAME}"


def summarize_nodes(report: ReportFields) -> Iterator[tuple[str, ReportFields]]:
    """Yield for each node its name and the report fields that are posted to the coordinator."""
    for node, group in groupby(report["ranks"], key=lambda placement: placement["node"]):
        placements = list(group)
        devices = [placement["device"] for placement in placements]
        node_fields = {
            "host": placements[0]["host"],
            "ranks": _format_number_ranges([placement["rank"] for placement in placements]),
            "devices": ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)),
            "uuids": [placement["uuid"] for placement in placements if placement["uuid"]],
        }
        shared_fields = {
            "parameters": f"{report['parameters']:,}",
            **({"tokens_per_step": report["tokens_per_step"]} if "tokens_per_step" in report else {}),
            "versions": report["versions"],
            "communication": report["communication"],
        }
        yield node, {**{name: value for name, value in node_fields.items() if value}, **shared_fields}


def _collect_rank_placement(runtime: Runtime, mesh: Mesh | None) -> RankPlacement:
    device, uuid = platform.machine() or "CPU", ""
    if runtime.device.type == "cuda":
        properties = torch.cuda.get_device_properties(runtime.device)
        device, uuid = properties.name, str(getattr(properties, "uuid", ""))
    host = socket.gethostname()
    return RankPlacement(
        runtime.rank,
        runtime.node,
        host,
        runtime.local_rank,
        device,
        uuid,
        _read_driver_version(),
        *((mesh.pipe_rank, mesh.tensor_rank, mesh.replica_rank) if mesh else (0, 0, runtime.rank)),
    )


def _collect_versions(driver_version: str) -> dict[str, str]:
    versions = {"swarmtrain": swarmtrain.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions | ({"driver": driver_version} if driver_version else {})


def _read_driver_version() -> str:
    for path in _DRIVER_VERSION_FILES:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return ""


def _format_number_ranges(numbers: Sequence[int]) -> str:
    """Return the ascending `numbers`, formatted as ranges, such as "0-3, 8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)
