"""The trainer's tests: real processes over gloo, exact claims."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Ranks and suites outnumber the cores. Threads that spin for each other would take them: a test of 0.2 s took 84 s on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torch", reason="the trainer needs torch")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import master as of_determined  # noqa: E402  # lies there
import torch.distributed as dist  # noqa: E402  # where it is
import worlds  # noqa: E402  # needs the path above

from swarmtrain.entrypoint.notices import Notices  # noqa: E402  # as above
from swarmtrain.entrypoint.rendezvous import BoardServer  # noqa: E402  # as above
from swarmtrain.trainer.data import memory_map  # noqa: E402
from swarmtrain.wire import Event  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> Iterator[None]:
    """One server that has everything imported; ranks are forked from it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    worlds.CONTEXT.set_forkserver_preload(["swarmtrain.trainer.own", "training_code", "worlds"])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def published() -> list[Event]:
    return []


@pytest.fixture
def board(published: list[Event]) -> Iterator[str]:
    """A real board's address; what it is told is in `published`."""
    notices = Notices(
        run="test", max_restarts=3, max_restarts_per_hour=20, min_nodes=1, boot="b", now=time.monotonic, publish=published.append
    )
    with BoardServer(("127.0.0.1", 0), notices) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def master() -> Iterator[of_determined.Master]:
    """A master of Determined."""
    with of_determined.answering() as server:
        yield server


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small config whose data is there: words of a made-up language, 64 letters."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(1)
    words = [random.integers(0, 63, size=random.integers(2, 7)) for _ in range(40)]
    for name, documents in (("train", 30), ("heldout", 5)):
        texts = ([*words[index], 63] for index in random.integers(0, len(words), size=documents * 50))
        stream = np.concatenate([np.array(text) for text in texts])
        memory_map.write(folder / name, np.array_split(stream, documents), "uint8")
    data = {"data_prefixes": [str(folder / "train")], "validation_data_prefixes": [str(folder / "heldout")]}
    return worlds.changed(worlds.CONFIG, data=data)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No launcher, and a folder of one's own."""
    log = logging.getLogger("swarmtrain")
    before = log.handlers[:], log.propagate, log.level
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SWARMTRAIN_CONFIG"):
        monkeypatch.setenv(name, "")  # so that what a run sets is taken out again
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield
    log.handlers[:], log.propagate, log.level = before
    if dist.is_initialized():
        dist.destroy_process_group()
