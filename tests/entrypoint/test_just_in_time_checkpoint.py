"""Whole runs whose ranks, nodes and savers are killed: the surviving ranks save the last completed step once, and no step is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from swarmtrain import process
from swarmtrain.trainer.data import memory_map

ROOT = Path(__file__).parents[2]

# The real training_code.py, slowed down a little, so that a test can act between two given steps.
TRAIN = """
import os, pathlib, sys, time
import training_code
from swarmtrain.trainer import Run
from swarmtrain.trainer.checkpoint.storage.tensor_storage import TensorStorageWriter
write, folder = TensorStorageWriter.write_staged_shards, pathlib.Path(sys.argv[1])
def slow_down(run, batch):
    time.sleep(0.02)
    try:
        (folder / "pause").unlink()
        time.sleep(30)
    except FileNotFoundError:
        pass
    return forward_backward(run, batch)
def watched(writer):
    if (folder / "slow").exists():
        (folder / "slow").unlink()
        (writer.folder / writer.file_name).write_bytes(b"torn")
        (folder / "writing").write_text(str(os.getpid()))
        time.sleep(60)
    return write(writer)
forward_backward, Run.forward_backward = Run.forward_backward, slow_down
TensorStorageWriter.write_staged_shards = watched
home = folder / os.environ.get("SWARMTRAIN_NODE", "")
home.mkdir(exist_ok=True)
os.chdir(home)
training_code.main()
"""
TRAIN_WITH_DEVICE_COLLECTIVES = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import device_collectives
device_collectives.install()
{TRAIN}
"""
TRAIN_WITH_CHANGING_ASSIGNMENT = f"""
from swarmtrain.trainer.health.micro_batch_assignment import MicroBatchReassigner
MicroBatchReassigner.reassign = lambda reassigner, timings, counts, step: ((2, 1, 1, 0) * 2)[step % 4 :][:4]
{TRAIN}
"""
STEPS = 80
CONFIG: dict[str, Any] = {
    "topology": {"global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"gradient_clipping": 0.5},
    "learning_rate_scheduler": {"learning_rate": 1e-3, "learning_rate_warmup_steps": 2, "learning_rate_decay_iters": STEPS},
    "trainer": {"train_iterations": STEPS, "save_interval": None},
    "transformer_architecture": {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "sequence_length": 16},
}


def write_config(folder: Path, topology: Mapping[str, Any], *, own_disks: bool = False) -> Path:
    """Write data and config into `folder`; return the config's path. With `own_disks`, save_dir is in the node's folder (see TRAIN)."""
    memory_map.write_token_files(folder / "train", np.array_split(np.random.default_rng(1).integers(0, 64, 4000), 20), "uint8")
    config = {
        **CONFIG,
        "topology": {**CONFIG["topology"], **topology},
        "trainer": {**CONFIG["trainer"], "save_dir": "run" if own_disks else str(folder / "run"), "save_dir_shared": not own_disks},
        "diloco": {"inner_steps": 40, "fragments": 2, "overlap": 15, "mixing": 0.5} if "learners" in topology else {},
        "logger": {"audit_dir": str(folder / "audit")},
        "data": {"data_prefixes": [str(folder / "train")]},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that runs undisturbed."""
    return train_in_one_process(tmp_path_factory.mktemp("alone"))


def train_in_one_process(folder: Path, **topology: Any) -> dict[int, float]:
    """Return the loss of every step of a run in one process."""
    environment = {"SWARMTRAIN_CONFIG": str(write_config(folder, topology)), "OMP_NUM_THREADS": "1"}
    process.run_command([sys.executable, "training_code.py"], cwd=ROOT, env=environment)
    lines = (folder / "audit" / "world-000001-rank-0000.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


class TrainingRun:
    """A small run of two nodes that really trains, and the audit of its ranks."""

    def __init__(self, run: Any, *, own_disks: bool = False, script: str = TRAIN, **topology: Any) -> None:
        self.run, self._script = run, script
        write_config(run.folder, topology, own_disks=own_disks)
        run.start_coordinator()
        for number in (0, 1):
            self.start_node(number)

    def start_node(self, number: int) -> None:
        self.run.start_node(number, self._script, str(self.run.folder))

    def read_audit(self) -> dict[int, dict[int, list[dict[str, Any]]]]:
        """Return the audit lines of all ranks by generation and step."""
        found: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for path in sorted((self.run.folder / "audit").glob("*.jsonl")):
            lines = path.read_text().splitlines(keepends=True)
            for line in map(json.loads, [line for line in lines if line.endswith("\n")]):  # the last one may not be complete
                found.setdefault(line["generation"], {}).setdefault(line["step"], []).append(line)
        return found

    def wait_for_steps(self, world: int, steps: int = 10) -> None:
        """Wait until world `world` has made this many steps."""
        end = time.monotonic() + 120
        while len(self.read_audit().get(world, {})) < steps:
            assert time.monotonic() < end, self.run.format_transcript()
            time.sleep(0.02)

    def wait_for_writer(self) -> int:
        """Return the pid of the rank that has begun to write a checkpoint, and sleeps meanwhile."""
        path, end = self.run.folder / "writing", time.monotonic() + 60
        while not path.exists() or not path.read_text():
            assert time.monotonic() < end, self.run.format_transcript()
            time.sleep(0.02)
        return int(path.read_text())

    def ranks(self) -> dict[int, int]:
        """Return pid → rank of each process of the newest world; all must be alive."""
        of_nodes = self.run.read_events("world")[-1].data["ranks"].items()
        return {pid: rank for node, ranks in of_nodes for pid, rank in zip(self.run.find_ranks(int(node[-1])), ranks, strict=True)}

    def count_lost_steps(self, *died: Collection[int]) -> list[int]:
        """Return for each world after the first how many steps it recomputed that a surviving rank had completed.

        `died`: the killed ranks of each world. One of them may have completed a step that no other rank completed: its last
        messages are lost with its connections, and no surviving rank can save that step.
        """
        worlds = [steps for _, steps in sorted(self.read_audit().items())]
        outlived = [
            max(step for step, lines in steps.items() if any(line["rank"] not in dead for line in lines))
            for steps, dead in zip(worlds, died, strict=False)
        ]
        return [last + 1 - min(after) for last, after in zip(outlived, worlds[1:], strict=True)]

    def read_losses(self) -> dict[int, float]:
        """Return the loss of every step. Ranks and worlds that made the same step must agree."""
        seen: dict[int, set[float]] = {}
        for steps in self.read_audit().values():
            for step, lines in steps.items():
                seen.setdefault(step, set()).update(line["loss"] for line in lines)
        assert all(len(values) == 1 for values in seen.values())
        return {step: next(iter(values)) for step, values in seen.items()}


def kill_processes(*pids: int) -> None:
    """Kill these processes at once, so that the others have no time to save in between."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_surviving_ranks_save_the_last_step(small_run: Any, undisturbed_losses: dict[int, float]) -> None:
    """A rank is killed, and then the one that saves in its place; then a node; then a rank hangs."""
    trained = TrainingRun(small_run)
    trained.wait_for_steps(1)
    (small_run.folder / "slow").touch()
    ranks, first = trained.ranks(), small_run.find_ranks(1)[0]
    kill_processes(first)
    kill_processes(second := trained.wait_for_writer())
    trained.wait_for_steps(2)
    of_node0 = small_run.read_events("world")[-1].data["ranks"]["node0"]
    small_run.nodes["node0"].kill()
    small_run.nodes["node0"].wait()
    trained.start_node(0)
    trained.wait_for_steps(3)
    stopped = small_run.find_ranks(0)[1]
    halted = trained.ranks()[stopped]
    os.kill(stopped, signal.SIGSTOP)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert len(small_run.read_events("world")) == 4
    assert trained.count_lost_steps({ranks[first], ranks[second]}, of_node0, {halted}) == [0, 0, 0]
    assert [len(event.data["surviving_ranks"]) for event in small_run.read_events("checkpoint")[:3]] == [1, 1, 1]
    assert trained.read_losses() == undisturbed_losses


def test_surviving_ranks_save_to_their_own_disk(
    small_run: Any, undisturbed_losses: dict[int, float], wait_until_dead: Callable[[list[int]], None]
) -> None:
    """All processes of a node die and its disk is lost; it comes back empty. Then a rank dies, and both nodes save."""
    trained = TrainingRun(small_run, own_disks=True)
    trained.wait_for_steps(1)
    family, of_node0 = small_run.find_ranks(0), small_run.read_events("world")[-1].data["ranks"]["node0"]
    kill_processes(small_run.find_agent(0))
    wait_until_dead(family)
    shutil.rmtree(small_run.folder / "node0")
    trained.wait_for_steps(2)
    ranks, victim = trained.ranks(), small_run.find_ranks(0)[1]
    kill_processes(victim)
    trained.wait_for_steps(3)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert trained.count_lost_steps(of_node0, {ranks[victim]}) == [0, 0]
    first, second, *_ = [event.data for event in small_run.read_events("checkpoint")]
    assert (len(first["surviving_ranks"]), len(second["surviving_ranks"])) == (1, 2)
    for node in ("node0", "node1"):
        stands = {path.name for path in (small_run.folder / node / "run").glob("step-*")}
        assert {f"step-{step:08}" for step in (first["step"], second["step"], STEPS)} == stands, "the first was brought to who had lost it"
    assert "node0 has" not in small_run.read_output(), "what both have saved is the same"
    assert trained.read_losses() == undisturbed_losses


@pytest.mark.test_all_only("one more life of a run; the gate has replicas, and a pipeline whose stages are saved by several")
def test_a_sharded_state_is_saved_by_the_surviving_replicas(small_run: Any, undisturbed_losses: dict[int, float]) -> None:
    """Each replica has two shards. One rank of each dies: the other two hold a complete state. Then both replicas of one shard die."""
    trained = TrainingRun(small_run, data_parallel_type="hsdp", data_parallel_shard_size=2)
    trained.wait_for_steps(1)
    ranks, victims = trained.ranks(), (small_run.find_ranks(0)[0], small_run.find_ranks(1)[1])
    kill_processes(*victims)
    trained.wait_for_steps(2)
    saved = small_run.read_events("checkpoint")[0].data
    kill_processes(small_run.find_ranks(0)[0], small_run.find_ranks(1)[0])
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    of_nodes = small_run.read_events("world")[0].data["ranks"]
    assert sorted(saved["surviving_ranks"]) == sorted([of_nodes["node0"][1], of_nodes["node1"][0]])
    first, second = trained.count_lost_steps({ranks[victim] for victim in victims}, ())
    assert first == 0
    assert second > 0, "nobody had the whole of the last step"
    assert [event.data["step"] for event in small_run.read_events("resumed")] == [saved["step"]] * 2
    assert trained.read_losses() == undisturbed_losses


@pytest.mark.test_all_only("one more life of a run; the gate has replicas without learners")
def test_learners_are_saved_by_surviving_replicas(small_run: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two learners of two ranks each, which exchange fragments during steps 20 to 35 and 40 to 55. One rank of each learner dies during the
    first exchange, and no step is lost. Then both ranks of a learner die.
    """
    undisturbed = train_in_one_process(tmp_path_factory.mktemp("alone"), learners=2)
    trained = TrainingRun(small_run, learners=2)
    trained.wait_for_steps(1, 22)
    ranks = trained.ranks()
    of_learner = [[pid for pid, rank in ranks.items() if rank // 2 == learner] for learner in (0, 1)]
    victims = of_learner[0][0], of_learner[1][1]
    kill_processes(*victims)
    trained.wait_for_steps(2, 15)
    saved = small_run.read_events("checkpoint")[0].data
    kill_processes(*(pid for pid, rank in trained.ranks().items() if rank < 2))
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    first, second = trained.count_lost_steps({ranks[victim] for victim in victims}, ())
    assert first == 0
    assert second > 0, "no rank had the whole of the last step"
    assert [event.data["step"] for event in small_run.read_events("resumed")] == [saved["step"]] * 2
    assert trained.read_losses() == undisturbed


@pytest.mark.parametrize(
    "split",
    [pytest.param("model_parallel_size", marks=pytest.mark.test_all_only("the same with tensor parallelism")), "pipe_parallel_size"],
)
def test_a_sharded_model_is_saved_by_parts_of_several_replicas(small_run: Any, undisturbed_losses: dict[int, float], split: str) -> None:
    """Two replicas of a model in two shards. One rank of each shard dies: no replica is complete, but together they are."""
    trained = TrainingRun(small_run, **{split: 2})
    trained.wait_for_steps(1)
    ranks, victims = trained.ranks(), (small_run.find_ranks(0)[0], small_run.find_ranks(1)[1])
    kill_processes(*victims)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert trained.count_lost_steps({ranks[victim] for victim in victims}) == [0]
    assert len(small_run.read_events("checkpoint")[0].data["surviving_ranks"]) == 2
    assert trained.read_losses() == pytest.approx(undisturbed_losses, rel=1e-5)


@pytest.mark.parametrize("mode", ["bf16", "powersgd"])
@pytest.mark.test_all_only("trains twice for each; the gate has the same without compression, and compression with a resume")
def test_surviving_ranks_save_with_compressed_gradients(small_run: Any, tmp_path: Path, mode: str) -> None:
    """Losses depend on the number of ranks then, so they are compared with those of four undisturbed ranks."""
    settings = {"powersgd": {"start_step": 4, "matrix_approximation_rank": 2}} if mode == "powersgd" else {}
    trained = TrainingRun(small_run, gradient_compression=mode, **settings)
    trained.wait_for_steps(1)
    ranks, victim = trained.ranks(), small_run.find_ranks(1)[0]
    kill_processes(victim)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert trained.count_lost_steps({ranks[victim]}) == [0]
    saved = small_run.read_events("checkpoint")[0].data
    assert len(saved["surviving_ranks"]) == 1
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "training_code.py"]
    environment = {"SWARMTRAIN_CONFIG": str(write_config(folder, {"gradient_compression": mode, **settings})), "OMP_NUM_THREADS": "1"}
    process.run_command(argv, cwd=ROOT, env=environment)
    lines = (folder / "audit" / "world-000001-rank-0000.jsonl").read_text().splitlines()
    undisturbed, losses = {line["step"]: line["loss"] for line in map(json.loads, lines)}, trained.read_losses()
    last_equal_step = STEPS if mode == "bf16" else saved["step"] + 1  # the loss of a step is that before its update
    assert {step: losses[step] for step in range(1, last_equal_step + 1)} == {
        step: undisturbed[step] for step in range(1, last_equal_step + 1)
    }
    has_reset = "the error feedback of gradient compression is reset: the checkpoint has none" in small_run.read_output()
    assert has_reset == (mode == "powersgd")


def test_surviving_ranks_save_while_collectives_wait_for_dead_peers(small_run: Any, undisturbed_losses: dict[int, float]) -> None:
    """Collectives as over NCCL, which raise nothing: a rank is killed, and then two that are in different steps, or in none."""
    trained = TrainingRun(small_run, script=TRAIN_WITH_DEVICE_COLLECTIVES)
    trained.wait_for_steps(1)
    ranks, first = trained.ranks(), small_run.find_ranks(1)[0]
    kill_processes(first)
    trained.wait_for_steps(2)
    later_ranks, others = trained.ranks(), (small_run.find_ranks(0)[1], small_run.find_ranks(1)[1])
    kill_processes(*others)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert trained.count_lost_steps({ranks[first]}, {later_ranks[other] for other in others}) == [0, 0]
    assert [len(event.data["surviving_ranks"]) for event in small_run.read_events("checkpoint")[:2]] == [1, 1]
    assert trained.read_losses() == undisturbed_losses


@pytest.mark.test_all_only("one more life of a run; the gate has a constant assignment")
def test_surviving_ranks_save_while_the_assignment_of_micro_batches_changes(small_run: Any, undisturbed_losses: dict[int, float]) -> None:
    """Each step has other numbers of micro batches on the four replicas than the step before it; two ranks are killed in turn."""
    trained = TrainingRun(small_run, script=TRAIN_WITH_CHANGING_ASSIGNMENT)
    trained.wait_for_steps(1)
    ranks, first = trained.ranks(), small_run.find_ranks(1)[0]
    kill_processes(first)
    trained.wait_for_steps(2)
    later_ranks, second = trained.ranks(), small_run.find_ranks(0)[1]
    kill_processes(second)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert trained.count_lost_steps({ranks[first]}, {later_ranks[second]}) == [0, 0]
    assert [len(event.data["surviving_ranks"]) for event in small_run.read_events("checkpoint")[:2]] == [1, 1]
    counts = {tuple(sorted(len(line["samples"]) for line in lines)) for lines in trained.read_audit()[1].values() if len(lines) == 4}
    assert (0, 2, 2, 4) in counts
    assert trained.read_losses() == undisturbed_losses


@pytest.mark.test_all_only("takes over a minute: a pause of 30 s, and a peer that does not respond for 25 s")
def test_a_slow_rank_is_waited_for_and_a_frozen_one_is_not(small_run: Any, undisturbed_losses: dict[int, float]) -> None:
    """Over gloo, the peers of a rank that pauses for 30 s would give up; as over NCCL, they wait while it responds."""
    trained = TrainingRun(small_run, script=TRAIN_WITH_DEVICE_COLLECTIVES)
    trained.wait_for_steps(1)
    (small_run.folder / "pause").touch()
    trained.wait_for_steps(1, 30)
    assert not (small_run.folder / "pause").exists()
    ranks, stopped = trained.ranks(), small_run.find_ranks(0)[1]
    os.kill(stopped, signal.SIGSTOP)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert len(small_run.read_events("world")) == 2, "the pause has not ended a world"
    assert trained.count_lost_steps({ranks[stopped]}) == [0]
    assert trained.read_losses() == undisturbed_losses
