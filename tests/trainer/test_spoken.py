"""What ranks print, each as much as its place gives it to say, and write to files of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import ROOT, World, changed

from swarmtrain.config import Config
from swarmtrain.config.load import load
from swarmtrain.config.topology import TopologyConfig

TOPOLOGY = {"model_parallel_size": 2, "pipe_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1}


def printed(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank-{rank}.log").read_text().splitlines()


def test_ranks_print_by_where_they_stand_and_write_all_to_files(tmp_path: Path, config: dict[str, Any]) -> None:
    logger = {"log_ranks": {"pipe_parallel_rank": 1, "model_parallel_rank": 0}, "log_file_per_rank": True, "log_dir": "logs"}
    world = World(tmp_path, changed(config, topology=TOPOLOGY, logger=logger), 8, script="speaking")
    assert world.wait() == [0] * 8, world.log()
    for rank in range(8):
        place = TopologyConfig.model_validate(TOPOLOGY).place(rank, 8)
        prefix = f"[rank {rank}] " if rank else ""
        says = "pipe {pipe} data {data} model {model}".format(**place)
        chosen = place["pipe"] == 1 and place["model"] == 0
        assert printed(tmp_path, rank) == [*([f"{prefix}{says}"] if chosen else []), f"{prefix}beware"]
        written = (tmp_path / "logs" / f"rank-{rank:04}.log").read_text().splitlines()
        assert [line.split(" ", 2)[2] for line in written] == [f"INFO {says}", "WARNING beware"]


def test_ranks_print_the_steps_by_number(tmp_path: Path, config: dict[str, Any]) -> None:
    world = World(tmp_path, changed(config, logger={"log_ranks": [1]}, trainer={"train_iterations": 2}), 2)
    assert world.wait() == [0, 0], world.log()
    assert not any("tokens/s" in line for line in printed(tmp_path, 0))
    assert sum(line.startswith("[rank 1] step 2/2  loss") for line in printed(tmp_path, 1)) == 1


@pytest.mark.parametrize(("when", "environ", "colored"), [("auto", {}, True), ("auto", {"NO_COLOR": "1"}, False), ("never", {}, False)])
def test_a_terminal_has_colours_unless_they_are_not_wanted(when: str, environ: dict[str, str], *, colored: bool) -> None:
    assert ("\033[33mbeware" in on_a_terminal(when, environ)) == colored


def on_a_terminal(when: str, environ: dict[str, str]) -> str:
    program = (
        "import logging; from swarmtrain.config import Config; from swarmtrain.trainer import spoken\n"
        f"spoken.begin(Config.model_validate({{'logger': {{'log_color': '{when}'}}}}, strict=False), 0, 1)\n"
        "logging.getLogger('swarmtrain').warning('beware')"
    )
    ours, theirs = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**inherited, **environ}, stdout=theirs, check=True)
        os.close(theirs)
        return terminal.read(1000).decode()


def test_a_context_parallel_mesh_counts_replicas() -> None:
    topology = TopologyConfig.model_validate({"context_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1})
    assert [topology.place(rank, 4)["data"] for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("given", ["[0, 3]", "{data_parallel_rank: 1}", "{ranks: [2], pipe_parallel_rank: 0}"])
def test_ranks_survive_the_way_to_the_node(given: str) -> None:
    config = load(ROOT / "examples" / "quickstart.yml", [f"logger.log_ranks={given}"])
    assert Config.from_json(config.to_json()) == config


def test_files_need_a_folder() -> None:
    for name in ("log_file_per_rank", "use_csv", "use_tensorboard"):
        with pytest.raises(ValueError, match="has no folder to write to"):
            Config.model_validate({"logger": {name: True}})
        Config.model_validate({"logger": {name: True}, "trainer": {"save_dir": "run"}}, strict=False)
