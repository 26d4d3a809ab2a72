"""Log output: ranks print by their mesh position, and write everything to their own files."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import ROOT, LocalWorld, merge_config

from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.config.schema.topology import TopologyConfig

TOPOLOGY = {"model_parallel_size": 2, "pipe_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1}


def read_log_lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank-{rank}.log").read_text().splitlines()


def test_ranks_print_by_their_mesh_position_and_write_all_to_files(tmp_path: Path, config: dict[str, Any]) -> None:
    logger = {"log_ranks": {"pipe_parallel_rank": 1, "model_parallel_rank": 0}, "log_file_per_rank": True, "log_dir": "logs"}
    world = LocalWorld(tmp_path, merge_config(config, topology=TOPOLOGY, logger=logger), 8, script="log_mesh_position")
    assert world.wait() == [0] * 8, world.read_log()
    for rank in range(8):
        place = TopologyConfig.model_validate(TOPOLOGY).compute_rank_coordinates(rank, 8)
        prefix = f"[rank {rank}] " if rank else ""
        says = "pipe {pipe} data {data} model {model}".format(**place)
        chosen = place["pipe"] == 1 and place["model"] == 0
        assert read_log_lines(tmp_path, rank) == [*([f"{prefix}{says}"] if chosen else []), f"{prefix}beware"]
        written = (tmp_path / "logs" / f"rank-{rank:04}.log").read_text().splitlines()
        assert [line.split(" ", 2)[2] for line in written] == [f"INFO {says}", "WARNING beware"]


def test_ranks_print_the_steps_by_number(tmp_path: Path, config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(config, logger={"log_ranks": [1]}, trainer={"train_iterations": 2}), 2)
    assert world.wait() == [0, 0], world.read_log()
    assert not any("tokens/s" in line for line in read_log_lines(tmp_path, 0))
    assert sum(line.startswith("[rank 1] step 2/2  loss") for line in read_log_lines(tmp_path, 1)) == 1


@pytest.mark.parametrize(
    ("log_color", "environ", "colored"), [("auto", {}, True), ("auto", {"NO_COLOR": "1"}, False), ("never", {}, False)]
)
def test_a_terminal_has_colors_unless_they_are_disabled(log_color: str, environ: dict[str, str], *, colored: bool) -> None:
    assert ("\033[33mbeware" in run_on_terminal(log_color, environ)) == colored


def run_on_terminal(when: str, environ: dict[str, str]) -> str:
    program = (
        "import logging; from swarmtrain.config import Config; from swarmtrain.trainer import log_setup\n"
        f"log_setup.configure_logging(Config.model_validate({{'logger': {{'log_color': '{when}'}}}}, strict=False), 0, 1)\n"
        "logging.getLogger('swarmtrain').warning('beware')"
    )
    parent_end, child_end = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with os.fdopen(parent_end, "rb", buffering=0) as terminal:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**inherited, **environ}, stdout=child_end, check=True)
        os.close(child_end)
        return terminal.read(1000).decode()


def test_a_context_parallel_mesh_counts_replicas() -> None:
    topology = TopologyConfig.model_validate({"context_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1})
    assert [topology.compute_rank_coordinates(rank, 4)["data"] for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("log_ranks", ["[0, 3]", "{data_parallel_rank: 1}", "{ranks: [2], pipe_parallel_rank: 0}"])
def test_ranks_survive_the_way_to_the_node(log_ranks: str) -> None:
    config = load_config(ROOT / "examples" / "quickstart.yml", [f"logger.log_ranks={log_ranks}"])
    assert Config.from_json(config.to_json()) == config


def test_files_need_a_folder() -> None:
    for name in ("log_file_per_rank", "use_csv", "use_tensorboard"):
        with pytest.raises(ValueError, match="has no output directory"):
            Config.model_validate({"logger": {name: True}})
        Config.model_validate({"logger": {name: True}, "trainer": {"save_dir": "run"}}, strict=False)
