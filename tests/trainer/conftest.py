"""Trainer tests: real processes over gloo, exact claims."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Ranks and test suites outnumber the cores, and spinning OpenMP threads would occupy them: a 0.2 s test took 84 s on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torch", reason="the trainer needs torch")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import determined_service as of_determined  # noqa: E402  # needs the path above
import torch.distributed as dist  # noqa: E402  # needs torch
import worlds  # noqa: E402  # needs the path above
from coordinator_thread import serve_coordinator  # noqa: E402  # as above

from swarmtrain.protocol import Event  # noqa: E402
from swarmtrain.trainer.data import memory_map  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _preload_modules() -> Iterator[None]:
    """Preload all modules in the fork server from which ranks are forked."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    worlds.CONTEXT.set_forkserver_preload(["swarmtrain.trainer.custom", "training_code", "worlds"])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def published_events() -> list[Event]:
    return []


@pytest.fixture
def coordinator_address(published_events: list[Event]) -> Iterator[str]:
    """The address of a real coordinator, which publishes its events to `published_events`."""
    with serve_coordinator(events=published_events) as served:
        yield served.address


@pytest.fixture
def determined_master() -> Iterator[of_determined.DeterminedMaster]:
    """A stand-in for Determined's master."""
    with of_determined.run_master() as server:
        yield server


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small config with existing data: words of a made-up language of 64 letters."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(1)
    words = [random.integers(0, 63, size=random.integers(2, 7)) for _ in range(40)]
    for name, documents in (("train", 30), ("heldout", 5)):
        texts = ([*words[index], 63] for index in random.integers(0, len(words), size=documents * 50))
        stream = np.concatenate([np.array(text) for text in texts])
        memory_map.write_token_files(folder / name, np.array_split(stream, documents), "uint8")
    data = {"data_prefixes": [str(folder / "train")], "validation_data_prefixes": [str(folder / "heldout")]}
    return worlds.merge_config(worlds.CONFIG, data=data)


@pytest.fixture
def _single_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run without a launcher, in a temporary working directory."""
    log = logging.getLogger("swarmtrain")
    before = log.handlers[:], log.propagate, log.level
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SWARMTRAIN_CONFIG"):
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what a run sets
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield
    for thread in threading.enumerate():  # a run that has raised an error may still commit to its relative save_dir
        if thread.name == "checkpoint":
            thread.join(timeout=10)
    log.handlers[:], log.propagate, log.level = before
    if dist.is_initialized():
        dist.destroy_process_group()
