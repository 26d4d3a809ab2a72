"""What runs where: told as a world begins, whole in the run's folder (report.json), short in the log, by node on the notice board.

Of the environment only what steers devices and communication is told, and of the config's own variables the names: values that
are nobody's business may be among them.
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
from swarmtrain.config.files import reason
from swarmtrain.trainer import agreement
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
NAME = "report.json"
_TOLD = re.compile(r"(NCCL|GLOO|TP|UCX|TORCH_NCCL)_|(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG)$")
_DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
_NODES_SHOWN = 8
Facts = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """One rank: where it is, what it computes on, and which part of the model and of the data it has."""

    rank: int
    node: str
    host: str
    local_rank: int
    device: str
    uuid: str
    """Of a GPU; empty for a CPU."""
    driver: str
    pipe: int
    tensor: int
    data: int


def gather(here: Runtime, token: int, model: ParallelModel) -> Facts:
    """Return all that is told of world `token`. Called by all ranks together."""
    places = agreement.gather(_place(here, model))
    config = here.config.model_dump(mode="json")
    config["runner"]["env"] = dict.fromkeys(config["runner"].get("env") or {}, "…")
    environment = {name: value for name, value in sorted(os.environ.items()) if _TOLD.match(name)}
    return {
        "run": here.run,
        "world": token,
        "time": time.time(),
        "parameters": model.size,
        "versions": _versions(places[0].driver),
        "communication": {"backend": "nccl and gloo" if here.device.type == "cuda" else "gloo", "environment": environment},
        "ranks": [asdict(place) for place in places],
        "config": config,
    }


def write(facts: Facts, folder: Path) -> None:
    """Write them to report.json in `folder`, in place of those of the world before. A folder that takes nothing is told."""
    aside = folder / f".{NAME}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(facts, indent=1) + "\n")
        aside.replace(folder / NAME)
    except OSError as error:
        LOG.warning("%s: cannot be written: %s", folder / NAME, reason(error))


def lines(facts: Facts) -> Iterator[str]:
    """Yield what the log is to say of them."""
    versions, environment = facts["versions"], facts["communication"]["environment"]
    interface = environment.get("NCCL_SOCKET_IFNAME", environment.get("GLOO_SOCKET_IFNAME", "")).lstrip("=")
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"ranks talk by {facts['communication']['backend']}{f' over {interface}' if interface else ''}"
    nodes = list(by_node(facts))
    for node, told in nodes[:_NODES_SHOWN]:
        yield f"{node}: {told['host']}, ranks {told['ranks']}, {told['devices']}"
    if len(nodes) > _NODES_SHOWN:
        yield f"and {len(nodes) - _NODES_SHOWN} nodes more, see {NAME}"


def by_node(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield for each node what the notice board is to say of it."""
    for node, found in groupby(facts["ranks"], key=lambda place: place["node"]):
        places = list(found)
        devices = [place["device"] for place in places]
        told = {
            "host": places[0]["host"],
            "ranks": _spans([place["rank"] for place in places]),
            "devices": ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)),
            "uuids": [place["uuid"] for place in places if place["uuid"]],
        }
        shared = {"parameters": f"{facts['parameters']:,}", "versions": facts["versions"], "communication": facts["communication"]}
        yield node, {**{name: value for name, value in told.items() if value}, **shared}


def _place(here: Runtime, model: ParallelModel) -> Place:
    device, uuid = platform.machine() or "CPU", ""
    if here.device.type == "cuda":
        properties = torch.cuda.get_device_properties(here.device)
        device, uuid = properties.name, str(getattr(properties, "uuid", ""))
    mesh = model.mesh
    host = socket.gethostname()
    return Place(here.rank, here.node, host, here.local_rank, device, uuid, _driver(), mesh.pipe_rank, mesh.tensor_rank, mesh.data_rank)


def _versions(driver: str) -> dict[str, str]:
    found = {"swarmtrain": swarmtrain.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found | ({"driver": driver} if driver else {})


def _driver() -> str:
    for path in _DRIVERS:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return ""


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers in order as 0-3, 8."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)
