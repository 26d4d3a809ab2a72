"""The Slurm launcher on a real Slurm: three machines of a lab, real jobs, the time limit, requeues, an allocation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import machines
from processes import below

from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound
from swarmtrain.lab import Lab
from swarmtrain.launchers import scaled_plan
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.slurm import SlurmLauncher, generate, job
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan
from swarmtrain.process import run
from swarmtrain.view.status import status
from swarmtrain.wire import RENDEZVOUS, VERDICT, Event

pytestmark = pytest.mark.test_all_only("one life of a run under Slurm is in the contract")

ROOT = Path(__file__).parents[2]
TRAIN = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.board import Board
from swarmtrain.wire import Event
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))  # a peer without power does not even hang up
name = os.environ["SWARMTRAIN_RUN"]
state = pathlib.Path(name + ".state")
step = int(state.read_text()) if state.exists() else 0
print(f"start at {step} of world {dist.get_world_size()}, {pathlib.Path(os.environ['TOKEN_FILE']).read_text()}")
while True:
    flag = torch.tensor([len(asked), pathlib.Path(name + ".enough").exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        print(f"left at {step}")
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0:
        pathlib.Path(name + ".new").write_text(str(step))
        os.replace(name + ".new", state)
        if step % 5 == 0:
            Board(os.environ["SWARMTRAIN_BOARD"]).post(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with machines(("n01", "n02", "n03", "n04"), part="slurm") as made:
        yield made


@pytest.fixture
def launcher(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLauncher]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in lab.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    made = SlurmLauncher()
    yield made
    subprocess.run(["scancel", "--user=root"], check=False)
    for name in made.runs():
        made.down(name, print)
    for pid in ours(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ours(folder: Path) -> list[int]:
    return below(folder / "home")


def plan_of(name: str = "demo", *, script: str = TRAIN, nodes: int = 2, least: int | None = None, **slurm: object) -> Plan:
    runner = {
        "runner_type": "slurm",
        "nodes": nodes,
        "min_nodes": least,
        "script": "training_code.py",
        "max_restarts": 2 if least else 0,
        "stop_grace": 10.0,
        "slurm": {"time": "10", "cpus_per_node": 1, **slurm},
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    cargo = Cargo((CodeFile.of("training_code.py", script.encode()),), (CodeFile.of("TOKEN", b"hush"),))
    return make_plan(config, SlurmLauncher().inventory(), cargo, run=name)


def until(launcher: SlurmLauncher, name: str, kind: str, where: Callable[[Event], bool] = lambda _: True, timeout: float = 60.0) -> Event:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := [event for event in launcher.events(name) if event.kind == kind and where(event)]:
            return found[-1]
        time.sleep(0.05)
    said = [f"{line.node} {line.text}" for line in launcher.logs(name, follow=False)]
    pytest.fail("\n".join([f"no {kind}", *said, *(path.read_text() for path in Path("home").rglob("slurm.out"))]))


def in_world(launcher: SlurmLauncher, name: str, number: int) -> None:
    """Wait until the run's world `number`, counted from 1, has made steps."""

    def worlds() -> list[float]:
        return [event.time for event in launcher.events(name) if event.kind == "world"]

    until(launcher, name, "progress", lambda event: len(worlds()) >= number and event.time > worlds()[number - 1])


def followed(launcher: SlurmLauncher, name: str) -> tuple[str, int, list[LogLine]]:
    updates = list(launcher.watch(name))
    last = [update for update in updates if isinstance(update, Event) and update.kind == VERDICT][-1]
    return f"{last.data['status']}: {last.data['why']}", last.data["exit_code"], [line for line in updates if isinstance(line, LogLine)]


def starts(launcher: SlurmLauncher, name: str) -> list[str]:
    return [line.text for line in launcher.logs(name, follow=False) if line.text.startswith("start at")]


def started(launcher: SlurmLauncher, name: str, wanted: list[str], since: int = -1) -> None:
    """Wait until the ranks have said how they start, from the line `since` on: theirs may come after what the board has."""
    end = time.monotonic() + 60
    while (found := starts(launcher, name)[since:]) != wanted:
        assert time.monotonic() < end, found
        time.sleep(0.1)


def number_of(launcher: SlurmLauncher, name: str) -> str:
    return str(json.loads(Path(f"home/swarmtrain/{name}/slurm.json").read_text())["job"])


def release(number: str, *changes: str) -> None:
    """Slurm lets a job that is queued again wait for two minutes; its owner may say otherwise.

    It must not begin in the very second in which it was ended: nodes would still hold its credential for revoked, and it would fail.
    """
    end = time.monotonic() + 60
    while job.state(number).state != "PENDING":  # what is said before the job is cleaned up is forgotten
        assert time.monotonic() < end, job.state(number)
        time.sleep(0.1)
    run(["scontrol", "update", f"JobId={number}", "StartTime=now+2", *changes])


def test_a_run_from_its_first_job_to_its_last(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """Submitted, queued again, scaled, done, removed."""
    plan = plan_of()
    assert launcher.check(plan) == []
    assert [str(change) for change in launcher.changes(plan)] == ["submit a job: is not there"]
    launcher.up(plan, print)
    assert launcher.changes(plan) == []
    assert launcher.deployed("demo") == (plan.config, plan.cargo)
    first = number_of(launcher, "demo")
    secrets = list(tmp_path.rglob("TOKEN"))
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600]
    in_world(launcher, "demo", 1)
    assert {task.node: (task.host, task.state) for task in launcher.tasks("demo")} == {
        "node0": ("n01", "running"),
        "node1": ("n02", "running"),
        RENDEZVOUS: ("n01", "running"),
    }
    # What a preemption does, by hand.
    run(["scontrol", "requeue", first])
    release(first)
    in_world(launcher, "demo", 2)
    assert number_of(launcher, "demo") == first
    launcher.up(scaled_plan(launcher, "demo", 3), print)
    in_world(launcher, "demo", 3)
    assert starts(launcher, "demo")[-1].endswith("of world 3, hush")
    assert not job.state(first).there
    steps = [int(line.split()[2]) for line in starts(launcher, "demo")]
    assert steps == sorted(steps)
    # At the requeue and the scale every rank was asked, and each time the next begins where it left.
    left = sorted({int(line.text.split()[2]) for line in launcher.logs("demo", follow=False) if line.text.startswith("left at")})
    assert [0, *left] == sorted(set(steps))
    assert len(left) == 2
    assert not [event for event in launcher.events("demo") if event.kind == "failure"]
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = followed(launcher, "demo")
    assert (outcome, code) == ("done: all 3 nodes have finished", 0)
    last = number_of(launcher, "demo")
    assert job.gone(last, 10)
    assert job.state(last).state == "COMPLETED"
    launcher.down("demo", print)
    assert launcher.runs() == []
    assert not list(tmp_path.rglob("TOKEN"))
    assert ours(tmp_path) == []
    with pytest.raises(RunNotFound):
        launcher.tasks("demo")


def test_near_its_time_limit_a_job_saves_and_queues_itself_again(launcher: SlurmLauncher, tmp_path: Path) -> None:
    launcher.up(plan_of(), print)
    number = number_of(launcher, "demo")
    in_world(launcher, "demo", 1)
    run(["scontrol", "update", f"JobId={number}", "TimeLimit=3"])  # the signal comes 180 s before; Slurm looks every half minute
    release(number, "TimeLimit=10")
    saved = (tmp_path / "demo.state").read_text()
    in_world(launcher, "demo", 2)
    assert number_of(launcher, "demo") == number
    started(launcher, "demo", [f"start at {saved} of world 2, hush"] * 2, since=2)
    assert not [event for event in launcher.events("demo") if event.kind in ("failure", VERDICT)]
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = followed(launcher, "demo")
    assert (outcome, code) == ("done: all 2 nodes have finished", 0)
    assert job.gone(number, 10)
    assert job.state(number).state == "COMPLETED"
    assert "Restarts=1 " in run(["scontrol", "show", "job", number])


def test_a_preempted_job_saves_within_its_grace_time_and_is_queued_again(launcher: SlurmLauncher, tmp_path: Path) -> None:
    launcher.up(plan_of(), print)
    number = number_of(launcher, "demo")
    in_world(launcher, "demo", 1)
    run(["sbatch", "--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1"])
    release(number)
    saved = (tmp_path / "demo.state").read_text()
    in_world(launcher, "demo", 2)
    started(launcher, "demo", [f"start at {saved} of world 2, hush"] * 2, since=2)
    assert not [event for event in launcher.events("demo") if event.kind in ("failure", VERDICT)]
    # One that is cancelled is told to leave in the same way, and stays away.
    job.tell(number)
    assert job.gone(number, 30)
    assert job.state(number).state == "CANCELLED"


def test_two_runs_on_the_same_nodes_and_the_code_of_the_one_that_fails(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """One by `deploy`, the other by hand from what `generate` writes; neither has the other's ports."""
    launcher.up(plan_of("one", nodes=3), print)
    script = tmp_path / "other.sbatch"
    failing = "import sys, os\nsys.exit(7)\n"
    generate(plan_of("other", nodes=3, script=failing), script)
    other = job.submit(script)
    in_world(launcher, "one", 1)
    assert job.gone(other, 60)
    outcome, code, _ = followed(launcher, "other")
    assert code == 7
    assert outcome.startswith("failed: ")
    assert "ExitCode=7:0" in run(["scontrol", "show", "job", other])
    assert launcher.runs() == ["one", "other"]
    assert not [event for event in launcher.events("one") if event.kind in (VERDICT, "failure")]
    launcher.down("one", print)
    launcher.down("other", print)
    assert run(["squeue", "--noheader"]) == ""
    assert ours(tmp_path) == []


def test_what_slurm_would_not_take_is_told_before(launcher: SlurmLauncher, tmp_path: Path) -> None:
    assert "partition" in launcher.check(plan_of(partition="gpu"))[0].message
    assert not list(tmp_path.rglob("TOKEN"))


def test_inside_an_allocation_srun_takes_its_nodes(launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = run(["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--job-name=mine"]) or ""
    number = run(["squeue", "--noheader", "--name=mine", "--format=%i"]).strip()
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launcher.check(plan_of(nodes=3))[0].fatal
    assert launcher.check(plan_of()) == []
    launcher.up(plan_of(), print)
    in_world(launcher, "demo", 1)
    assert launcher.changes(plan_of()) == []
    launcher.stop("demo", print)
    assert job.steps(number, "demo") == []
    assert job.state(number).state == "RUNNING"
    assert status("demo", launcher.events("demo"), launcher.tasks("demo"), time.time()).state == "stopped"
    saved = (tmp_path / "demo.state").read_text()
    launcher.up(plan_of(), print)
    in_world(launcher, "demo", 2)
    started(launcher, "demo", [f"start at {saved} of world 2, hush"])
    launcher.down("demo", print)
    assert ours(tmp_path) == []
    assert job.state(number).state == "RUNNING"


def test_plain_srun_finds_its_world(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    """Two tasks on two nodes; the names of the lab's nodes lead nowhere, so that where rank 0 is must be told."""
    from swarmtrain.trainer.data import memory_map

    memory_map.write(tmp_path / "words", [np.arange(64)] * 20, "uint8")
    shape = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 16}
    config = {
        "topology": {"global_batch_size": 4, "micro_batch_size": 1},
        "transformer_architecture": shape,
        "data": {"data_prefixes": ["words"]},
        "trainer": {"train_iterations": 3},
        "logger": {"audit_dir": "audit"},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))
    (tmp_path / "script.py").write_text(
        "import training_code\nfrom swarmtrain.trainer import agreement, train\n"
        "def shown(here, *rest, **facts):\n"
        "    print('world', sorted(agreement.gather((here.rank, here.local_rank, here.node))), flush=True)\n"
        "    return train(here, *rest, **facts)\n"
        "training_code.train = shown\ntraining_code.main()\n"
    )
    command = ["srun", "--nodes=2", "--ntasks=2", "--nodelist=n01,n02", "--time=2", sys.executable, "script.py", "config.yml"]
    printed = run(command, env={"MASTER_ADDR": lab.status()[0].address}, timeout=60)
    assert printed.splitlines().count("world [(0, 0, 'n01'), (1, 0, 'n02')]") == 2
    assert [len(path.read_text().splitlines()) for path in (tmp_path / "audit").glob("world-*-rank-000[01].jsonl")] == [3, 3]


def is_down(name: str) -> None:
    """Wait until Slurm has found out that a node is dead."""
    end = time.monotonic() + 60
    while name not in run(["sinfo", "--noheader", "--Node", "--states=down", "--format=%N"]).split():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_job_whose_first_node_dies_is_queued_again_by_the_others(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    launcher.up(plan_of(nodes=2, least=1, exclude="n01"), print)  # which has slurmctld
    in_world(launcher, "demo", 1)
    lab.kill("n02", say=print)
    is_down("n02")
    release(number_of(launcher, "demo"))
    saved = int((tmp_path / "demo.state").read_text())
    assert saved > 0
    in_world(launcher, "demo", 2)
    started(launcher, "demo", [f"start at {saved} of world 2, hush"])
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = followed(launcher, "demo")
    assert (outcome.partition(":")[0], code) == ("done", 0)
    lab.start("n02", say=print)


def test_a_run_goes_on_with_the_nodes_that_are_left(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    launcher.up(plan_of(nodes=2, least=1), print)
    in_world(launcher, "demo", 1)
    lab.kill("n02", say=print)
    in_world(launcher, "demo", 2)
    end = time.monotonic() + 60
    while not starts(launcher, "demo")[-1].endswith("of world 1, hush"):  # its line may come after the board's
        assert time.monotonic() < end
        time.sleep(0.1)
    number = number_of(launcher, "demo")
    is_down("n02")
    assert job.state(number).state == "RUNNING"
    # Near its time limit it is queued again all the same, and gets another node.
    run(["scancel", "--batch", "--signal=USR1", number])
    release(number)
    saved = (tmp_path / "demo.state").read_text()
    in_world(launcher, "demo", 3)
    started(launcher, "demo", [f"start at {saved} of world 2, hush"])
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = followed(launcher, "demo")
    assert (outcome.partition(":")[0], code) == ("done", 0)
    lab.start("n02", say=print)
