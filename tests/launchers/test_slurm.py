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
from intruder import assert_run_is_undisturbed, attack_from
from processes import find_run_pids
from ssh_hosts import start_lab

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound
from swarmtrain.lab import Lab
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.slurm import SlurmLauncher, slurm_cli
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.process import run_command
from swarmtrain.protocol import EVENT_OUTCOME, RENDEZVOUS_SERVICE, RUN_KEY_NAME, Event
from swarmtrain.protocol.distributed_env import compute_slurm_base_port
from swarmtrain.view.status import build_status

pytestmark = pytest.mark.test_all_only("one life of a run under Slurm is in the contract")

ROOT = Path(__file__).parents[2]
TRAIN = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
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
            CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with start_lab(("n01", "n02", "n03", "n04"), part="slurm") as lab:
        yield lab


@pytest.fixture
def launcher(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLauncher]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in lab.build_client_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    launcher = SlurmLauncher()
    yield launcher
    subprocess.run(["scancel", "--user=root"], check=False)
    for name in launcher.list_runs():
        launcher.tear_down_run(name, print)
    for pid in list_run_pids(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def list_run_pids(folder: Path) -> list[int]:
    return find_run_pids(folder / "home")


def plan_run(name: str = "demo", *, script: str = TRAIN, nodes: int = 2, min_nodes: int | None = None, **slurm: object) -> Plan:
    runner = {
        "runner_type": "slurm",
        "nodes": nodes,
        "min_nodes": min_nodes,
        "script": "training_code.py",
        "max_restarts": 2 if min_nodes else 0,
        "stop_grace": 10.0,
        "slurm": {"time": "10", "cpus_per_node": 1, **slurm},
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    cargo = Cargo((RunFile.from_content("training_code.py", script.encode()),), (RunFile.from_content("TOKEN", b"hush"),))
    return build_plan(config, SlurmLauncher().read_inventory(config.runner), cargo, run=name)


def wait_for_event(
    launcher: SlurmLauncher, name: str, kind: str, condition: Callable[[Event], bool] = lambda _: True, timeout: float = 60.0
) -> Event:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := [event for event in launcher.read_events(name) if event.kind == kind and condition(event)]:
            return found[-1]
        time.sleep(0.05)
    lines = [f"{line.node} {line.text}" for line in launcher.stream_logs(name, follow=False)]
    pytest.fail("\n".join([f"no {kind}", *lines, *(path.read_text() for path in Path("home").rglob("slurm.out"))]))


def wait_for_world(launcher: SlurmLauncher, name: str, number: int) -> None:
    """Wait until the run's world `number`, counted from 1, has made steps."""

    def list_world_times() -> list[float]:
        return [event.time for event in launcher.read_events(name) if event.kind == "world"]

    wait_for_event(
        launcher, name, "progress", lambda event: len(list_world_times()) >= number and event.time > list_world_times()[number - 1]
    )


def follow_to_outcome(launcher: SlurmLauncher, name: str) -> tuple[str, int, list[LogLine]]:
    updates = list(launcher.watch_run(name))
    outcome = [update for update in updates if isinstance(update, Event) and update.kind == EVENT_OUTCOME][-1]
    return (
        f"{outcome.data['status']}: {outcome.data['reason']}",
        outcome.data["exit_code"],
        [line for line in updates if isinstance(line, LogLine)],
    )


def list_starts(launcher: SlurmLauncher, name: str) -> list[str]:
    return [line.text for line in launcher.stream_logs(name, follow=False) if line.text.startswith("start at")]


def wait_for_starts(launcher: SlurmLauncher, name: str, expected: list[str], first: int = -1) -> None:
    """Wait until the ranks' start lines, from index `first` on, equal `expected`. Log lines may arrive after the coordinator's events."""
    wait_until_starts(launcher, name, lambda starts: starts[first:] == expected)


def wait_for_world_size(launcher: SlurmLauncher, name: str, size: int) -> None:
    """Wait until the last `size` start lines are those of a world of as many ranks."""
    wait_until_starts(launcher, name, lambda starts: [line.endswith(f"of world {size}, hush") for line in starts[-size:]] == [True] * size)


def wait_until_starts(launcher: SlurmLauncher, name: str, condition: Callable[[list[str]], bool]) -> None:
    end = time.monotonic() + 60
    while not condition(starts := list_starts(launcher, name)):
        assert time.monotonic() < end, starts
        time.sleep(0.1)


def read_job_id(launcher: SlurmLauncher, name: str) -> str:
    return str(json.loads(Path(f"home/swarmtrain/{name}/slurm.json").read_text())["job"])


def release_job(job_id: str, *changes: str) -> None:
    """Let a requeued job start in 2 s: by default Slurm delays it for 2 min.

    It must not start within the second in which it ended: nodes would still treat its credential as revoked, and it would fail.
    """
    end = time.monotonic() + 60
    while slurm_cli.read_job_state(job_id).state != "PENDING":  # Slurm drops changes that are made before the job is cleaned up
        assert time.monotonic() < end, slurm_cli.read_job_state(job_id)
        time.sleep(0.1)
    run_command(["scontrol", "update", f"JobId={job_id}", "StartTime=now+2", *changes])


def test_an_intruder_cannot_end_a_run_or_run_code_on_its_nodes(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(), print)
    port = compute_slurm_base_port({"SLURM_JOB_ID": read_job_id(launcher, "demo")})
    [key_file] = (tmp_path / "home").rglob(RUN_KEY_NAME)
    assert key_file.stat().st_mode & 0o777 == 0o600
    with attack_from(lab, "n04", key_file.read_bytes(), f"n01:{port}", seconds=20):
        wait_for_event(launcher, "demo", "progress")
    step = launcher.read_events("demo")[-1].data.get("step", 0)
    wait_for_event(launcher, "demo", "progress", lambda event: event.data["step"] > step + 100)
    assert_run_is_undisturbed(launcher.read_events("demo"))


def test_a_run_from_its_first_job_to_its_last(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """Submitted, requeued, scaled, done, removed."""
    plan = plan_run()
    assert launcher.check_plan(plan) == []
    assert [str(change) for change in launcher.plan_changes(plan)] == ["submit a job: the run is new"]
    launcher.deploy_run(plan, print)
    assert launcher.plan_changes(plan) == []
    assert launcher.load_deployment("demo") == (plan.config, plan.cargo)
    first = read_job_id(launcher, "demo")
    secrets = list(tmp_path.rglob("TOKEN"))
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600]
    wait_for_world(launcher, "demo", 1)
    assert {task.node: (task.host, task.state) for task in launcher.list_tasks("demo")} == {
        "node0": ("n01", "running"),
        "node1": ("n02", "running"),
        RENDEZVOUS_SERVICE: ("n01", "running"),
    }
    # What preemption does, done by hand.
    run_command(["scontrol", "requeue", first])
    release_job(first)
    wait_for_world(launcher, "demo", 2)
    assert read_job_id(launcher, "demo") == first
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(3)), print)
    wait_for_world(launcher, "demo", 3)
    wait_for_world_size(launcher, "demo", 3)
    assert not slurm_cli.read_job_state(first).is_active
    steps = [int(line.split()[2]) for line in list_starts(launcher, "demo")]
    assert steps == sorted(steps)
    # At the requeue and at the scaling every rank is asked to stop, and each time the next world resumes where they left.
    left = sorted({int(line.text.split()[2]) for line in launcher.stream_logs("demo", follow=False) if line.text.startswith("left at")})
    assert [0, *left] == sorted(set(steps))
    assert len(left) == 2
    assert not [event for event in launcher.read_events("demo") if event.kind == "failure"]
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = follow_to_outcome(launcher, "demo")
    assert (outcome, code) == ("done: all 3 nodes have finished", 0)
    last = read_job_id(launcher, "demo")
    assert slurm_cli.wait_until_job_gone(last, 10)
    assert slurm_cli.read_job_state(last).state == "COMPLETED"
    launcher.tear_down_run("demo", print)
    assert launcher.list_runs() == []
    assert not list(tmp_path.rglob("TOKEN"))
    assert list_run_pids(tmp_path) == []
    with pytest.raises(RunNotFound):
        launcher.list_tasks("demo")


def test_near_its_time_limit_a_job_saves_and_requeues_itself(launcher: SlurmLauncher, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(), print)
    number = read_job_id(launcher, "demo")
    wait_for_world(launcher, "demo", 1)
    run_command(["scontrol", "update", f"JobId={number}", "TimeLimit=3"])  # the signal comes 180 s before; Slurm checks every 30 s
    release_job(number, "TimeLimit=10")
    saved = (tmp_path / "demo.state").read_text()
    wait_for_world(launcher, "demo", 2)
    assert read_job_id(launcher, "demo") == number
    wait_for_starts(launcher, "demo", [f"start at {saved} of world 2, hush"] * 2, first=2)
    assert not [event for event in launcher.read_events("demo") if event.kind in ("failure", EVENT_OUTCOME)]
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = follow_to_outcome(launcher, "demo")
    assert (outcome, code) == ("done: all 2 nodes have finished", 0)
    assert slurm_cli.wait_until_job_gone(number, 10)
    assert slurm_cli.read_job_state(number).state == "COMPLETED"
    assert "Restarts=1 " in run_command(["scontrol", "show", "job", number])


def test_a_preempted_job_saves_within_its_grace_time_and_is_requeued(launcher: SlurmLauncher, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(), print)
    number = read_job_id(launcher, "demo")
    wait_for_world(launcher, "demo", 1)
    run_command(["sbatch", "--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1"])
    release_job(number)
    saved = (tmp_path / "demo.state").read_text()
    wait_for_world(launcher, "demo", 2)
    wait_for_starts(launcher, "demo", [f"start at {saved} of world 2, hush"] * 2, first=2)
    assert not [event for event in launcher.read_events("demo") if event.kind in ("failure", EVENT_OUTCOME)]
    # A cancelled job is asked to exit in the same way, and is not requeued.
    slurm_cli.signal_or_cancel_job(number)
    assert slurm_cli.wait_until_job_gone(number, 30)
    assert slurm_cli.read_job_state(number).state == "CANCELLED"


def test_two_runs_on_the_same_nodes_and_the_code_of_the_one_that_fails(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """One run by `deploy`, the other by hand from the output of `generate`. Their ports must not collide."""
    launcher.deploy_run(plan_run("one", nodes=3), print)
    script = tmp_path / "other.sbatch"
    failing = "import sys, os\nsys.exit(7)\n"
    SlurmLauncher.write_deployment_file(plan_run("other", nodes=3, script=failing), script)
    other = slurm_cli.submit_job(script)
    wait_for_world(launcher, "one", 1)
    assert slurm_cli.wait_until_job_gone(other, 60)
    outcome, code, _ = follow_to_outcome(launcher, "other")
    assert code == 7
    assert outcome.startswith("failed: ")
    assert "ExitCode=7:0" in run_command(["scontrol", "show", "job", other])
    assert launcher.list_runs() == ["one", "other"]
    assert not [event for event in launcher.read_events("one") if event.kind in (EVENT_OUTCOME, "failure")]
    launcher.tear_down_run("one", print)
    launcher.tear_down_run("other", print)
    assert run_command(["squeue", "--noheader"]) == ""
    assert list_run_pids(tmp_path) == []


def test_what_slurm_would_refuse_is_reported_before(launcher: SlurmLauncher, tmp_path: Path) -> None:
    assert "partition" in launcher.check_plan(plan_run(partition="gpu"))[0].message
    assert not list(tmp_path.rglob("TOKEN"))


def test_inside_an_allocation_srun_takes_its_nodes(launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = run_command(["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--job-name=mine"]) or ""
    number = run_command(["squeue", "--noheader", "--name=mine", "--format=%i"]).strip()
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launcher.check_plan(plan_run(nodes=3))[0].fatal
    assert launcher.check_plan(plan_run()) == []
    launcher.deploy_run(plan_run(), print)
    wait_for_world(launcher, "demo", 1)
    assert launcher.plan_changes(plan_run()) == []
    launcher.stop_run("demo", print)
    assert slurm_cli.list_job_steps(number, "demo") == []
    assert slurm_cli.read_job_state(number).state == "RUNNING"
    assert build_status("demo", launcher.read_events("demo"), launcher.list_tasks("demo"), time.time()).state == "stopped"
    saved = (tmp_path / "demo.state").read_text()
    launcher.deploy_run(plan_run(), print)
    wait_for_world(launcher, "demo", 2)
    wait_for_starts(launcher, "demo", [f"start at {saved} of world 2, hush"])
    launcher.tear_down_run("demo", print)
    assert list_run_pids(tmp_path) == []
    assert slurm_cli.read_job_state(number).state == "RUNNING"


def test_plain_srun_finds_its_world(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    """Two tasks on two nodes. The lab's node names do not resolve, so MASTER_ADDR is set to the address of rank 0."""
    from swarmtrain.trainer.data import memory_map

    memory_map.write_token_files(tmp_path / "words", [np.arange(64)] * 20, "uint8")
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
        "import training_code\nfrom swarmtrain.trainer import Run, collectives\n"
        "prepare_training = Run.prepare_training\n"
        "def print_world(run, *arguments):\n"
        "    place = (run.rank, run.local_rank, run.runtime.node)\n"
        "    print('world', sorted(collectives.all_gather_values(place)), flush=True)\n"
        "    prepare_training(run, *arguments)\n"
        "Run.prepare_training = print_world\ntraining_code.main()\n"
    )
    command = ["srun", "--nodes=2", "--ntasks=2", "--nodelist=n01,n02", "--time=2", sys.executable, "script.py", "config.yml"]
    printed = run_command(command, env={"MASTER_ADDR": lab.get_status()[0].address}, timeout=60)
    assert printed.splitlines().count("world [(0, 0, 'n01'), (1, 0, 'n02')]") == 2
    assert [len(path.read_text().splitlines()) for path in (tmp_path / "audit").glob("world-*-rank-000[01].jsonl")] == [3, 3]


def wait_until_down(name: str) -> None:
    """Wait until Slurm has marked a node as down."""
    end = time.monotonic() + 60
    while name not in run_command(["sinfo", "--noheader", "--Node", "--states=down", "--format=%N"]).split():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_job_whose_first_node_dies_is_requeued_by_the_others(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(nodes=2, min_nodes=1, exclude="n01"), print)  # the node of slurmctld
    wait_for_world(launcher, "demo", 1)
    lab.power_off_node("n02", report_progress=print)
    wait_until_down("n02")
    release_job(read_job_id(launcher, "demo"))
    saved = int((tmp_path / "demo.state").read_text())
    assert saved > 0
    wait_for_world(launcher, "demo", 2)
    wait_for_starts(launcher, "demo", [f"start at {saved} of world 2, hush"])
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = follow_to_outcome(launcher, "demo")
    assert (outcome.partition(":")[0], code) == ("done", 0)
    lab.power_on_node("n02", report_progress=print)


def test_a_run_continues_with_the_surviving_nodes(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(nodes=2, min_nodes=1), print)
    wait_for_world(launcher, "demo", 1)
    lab.power_off_node("n02", report_progress=print)
    wait_for_world(launcher, "demo", 2)
    wait_for_world_size(launcher, "demo", 1)
    number = read_job_id(launcher, "demo")
    wait_until_down("n02")
    assert slurm_cli.read_job_state(number).state == "RUNNING"
    # Near its time limit the job is requeued as usual, and gets another node.
    run_command(["scancel", "--batch", "--signal=USR1", number])
    release_job(number)
    saved = (tmp_path / "demo.state").read_text()
    wait_for_world(launcher, "demo", 3)
    wait_for_starts(launcher, "demo", [f"start at {saved} of world 2, hush"])
    (tmp_path / "demo.enough").touch()
    outcome, code, _ = follow_to_outcome(launcher, "demo")
    assert (outcome.partition(":")[0], code) == ("done", 0)
    lab.power_on_node("n02", report_progress=print)
