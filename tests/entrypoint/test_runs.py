"""Whole runs on this machine: real coordinators, supervisors, agents and gloo ranks, killed in every way that occurs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmtrain.config import Config
from swarmtrain.protocol import EXIT_PLANNED
from swarmtrain.trainer.data import memory_map

WaitUntilDead = Callable[..., None]


def test_two_nodes_finish_and_a_script_that_knows_nothing_of_us_gives_the_outcome(small_run: Any) -> None:
    script = (
        "import atexit, os, random, sys, numpy, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); out = [None] * 4\n"
        "dist.all_gather_object(out, (os.environ['RANK'], float(numpy.random.rand())))\n"
        "atexit.register(print, 'atexit ran')\n"
        "print('world of', len(out), sys.argv[1:], len({draw for _, draw in out}), 'draws', os.environ['SWARMTRAIN_RUN'])\n"
        "print('on stderr', file=sys.stderr)\n"
        "dist.destroy_process_group(); sys.exit()\n"
    )
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_node(number, script, "--lr", "1 2")
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}

    world = small_run.read_events("world")[-1].data
    assert (world["world_size"], world["nodes"]) == (4, 2)
    assert sorted(rank for ranks in world["ranks"].values() for rank in ranks) == [0, 1, 2, 3]
    assert sorted(world["ranks"]) == ["node0", "node1"]
    assert {event.data["interface"] for event in small_run.read_events("joined")} == {"lo"}
    assert [(event.data["status"], event.data["exit_code"]) for event in small_run.read_events("outcome")] == [("done", 0)]
    assert sorted((event.data["node"], event.data["exit_code"]) for event in small_run.read_events("left")) == [("node0", 0), ("node1", 0)]
    for rank in range(4):
        assert f"[rank {rank}] world of 4 ['--lr', '1 2'] 4 draws small\n" in small_run.read_output()
        assert f"[rank {rank}] on stderr\n" in small_run.read_output()
        assert f"[rank {rank}] atexit ran\n" in small_run.read_output()


def test_a_killed_rank_is_named_and_the_run_recovers(small_run: Any, wait_until_dead: WaitUntilDead) -> None:
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number)
    small_run.wait_for_event("progress")
    first, second = small_run.find_ranks(1)
    # When torch polls, the other rank has died of the lost connection; torch reports the first dead rank that it finds.
    os.kill(small_run.find_agent(1), signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    wait_until_dead([first, second], 30)
    os.kill(small_run.find_agent(1), signal.SIGCONT)
    failure = small_run.wait_for_event("failure", condition=lambda event: "signal" in event.data).data
    assert (failure["node"], failure["local_rank"], failure["signal"]) == ("node1", 1, "SIGKILL")
    assert failure["rank"] == small_run.read_events("world")[0].data["ranks"]["node1"][1]
    assert small_run.finish_training(worlds=2) == {"node0": 0, "node1": 0, "coordinator": 0}
    assert len(small_run.read_events("world")) == 2
    assert small_run.read_events("outcome")[0].data["status"] == "done"


def test_a_killed_agent_takes_its_ranks_along_and_comes_back(small_run: Any, wait_until_dead: WaitUntilDead) -> None:
    """The same for the fork server that the agent was forked from."""
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number)
    for worlds, killed in enumerate((small_run.find_agent, small_run.find_fork_server), start=1):
        formed = small_run.wait_for_event("world", count=worlds)
        small_run.wait_for_event("progress", condition=lambda event, after=formed.time: event.time > after)
        family = [small_run.find_agent(0), *small_run.find_ranks(0)]
        os.kill(killed(0), signal.SIGKILL)
        wait_until_dead(family)
    assert small_run.finish_training(worlds=3) == {"node0": 0, "node1": 0, "coordinator": 0}
    killed_here = [event for event in small_run.read_events("failure") if event.data.get("node") == "node0"]
    assert [event.data.get("signal") for event in killed_here] == ["SIGKILL"] * 2
    assert small_run.read_events("outcome")[0].data["status"] == "done"


def test_a_killed_supervisor_leaves_no_orphan_and_its_successor_joins(small_run: Any, wait_until_dead: WaitUntilDead) -> None:
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number)
    small_run.wait_for_event("progress")
    family = list(small_run.find_descendants(1))
    small_run.nodes["node1"].kill()
    wait_until_dead(family)
    small_run.start_training_node(1)
    assert small_run.finish_training(worlds=2) == {"node0": 0, "node1": 0, "coordinator": 0}


def test_the_coordinator_dies_and_the_nodes_reconnect_to_its_successor(small_run: Any) -> None:
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number, node_range=(1, 2))
    small_run.wait_for_event("progress")
    small_run.coordinator.kill()
    small_run.coordinator.wait()
    time.sleep(1.0)
    again = time.time()
    small_run.start_coordinator()
    met = small_run.wait_for_event("world", condition=lambda event: event.time > again and event.data["nodes"] == 2)
    small_run.wait_for_event("progress", condition=lambda event: event.time > met.time)
    (small_run.folder / "enough").touch()
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    worlds = [event.data for event in small_run.read_events("world")]
    assert len({world["world"].partition("/")[0] for world in worlds}) == 2
    # A restarted coordinator knows no nodes; on a busy machine, a node may not report within its first seconds.
    assert [world["nodes"] for world in worlds] in ([2, 2], [2, 1, 2]), "neither begins without the other, or they meet soon after"
    assert small_run.read_events("outcome")[0].data["status"] == "done"


def test_a_node_whose_machine_is_bad_is_quarantined_and_the_others_finish(small_run: Any) -> None:
    small_run.start_coordinator()
    bad = "step % 8 or os.environ['SWARMTRAIN_NODE'] != 'node2' or open('/proc/self/mem').read()"  # [Errno 5] Input/output error
    for number in range(3):
        small_run.start_training_node(number, slots=1, node_range=(2, 3), fault=bad)
    out = small_run.wait_for_event("quarantined")
    assert out.data["node"] == "node2"
    smaller = small_run.wait_for_event("world", condition=lambda event: event.time > out.time and event.data["nodes"] == 2)
    assert sorted(smaller.data["ranks"]) == ["node0", "node1"]
    begun = small_run.get_log_path(2).read_text().count("start at")
    small_run.wait_for_event("progress", condition=lambda event: event.time > smaller.time + 2)
    assert small_run.nodes["node2"].poll() is None, "what Swarm sees is a task that runs"
    (small_run.folder / "enough").touch()
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "node2": 0, "coordinator": 0}
    assert small_run.get_log_path(2).read_text().count("start at") == begun, "no rank of it was started meanwhile"
    assert small_run.read_events("world")[-1] == smaller
    assert small_run.read_events("outcome")[0].data["status"] == "done"


def test_a_node_whose_clock_is_an_hour_wrong_is_one_like_any_other(small_run: Any) -> None:
    """torch's own rendezvous would consider the other node dead."""
    libraries = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("needs Debian's package faketime")
    small_run.start_coordinator()
    note = "pathlib.Path(__file__).with_name('clock-' + os.environ['RANK']).write_text(str(time.time()))"
    small_run.start_training_node(0, fault=note)
    small_run.start_training_node(1, fault=note, environment={"LD_PRELOAD": str(libraries[0]), "FAKETIME": "+1h"})
    assert small_run.finish_training(worlds=1) == {"node0": 0, "node1": 0, "coordinator": 0}
    clocks = [float(path.read_text()) for path in small_run.folder.glob("clock-*")]
    assert max(clocks) - min(clocks) > 3000, "its clock is wrong indeed"
    times = [event.time for event in small_run.read_events()]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3000


def test_a_script_that_always_fails_uses_up_the_budget(small_run: Any) -> None:
    script = (
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '3': raise RuntimeError('the loss is purple')\n"
        "dist.barrier()\n"
    )
    small_run.start_coordinator(max_restarts=2)
    for number in (0, 1):
        small_run.start_node(number, script)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    verdict = small_run.read_events("outcome")[0].data
    ranks = small_run.read_events("world")[-1].data["ranks"]
    node = next(name for name in ranks if 3 in ranks[name])
    assert verdict["status"] == "failed"
    assert verdict["reason"].startswith(f"{node} rank 3: RuntimeError: the loss is purple, in script.py line 3;")
    assert verdict["exit_code"] == 1
    causes = [event.data for event in small_run.read_events("failure") if "purple" in event.data["error"]]
    assert len(causes) == 3
    assert causes[0]["traceback"].splitlines()[1].endswith('script.py", line 3, in <module>')
    assert small_run.read_output().count("[rank 3] RuntimeError: the loss is purple\n") == 3
    assert small_run.read_output().count("Traceback") <= 3 * 2, "the failing rank's, and what its peers saw if they were quicker"
    # An agent that does not react is killed after 10 s, long before the node's own grace period ends.
    assert small_run.read_events("left")[-1].time - small_run.read_events("outcome")[0].time < 15


# The real trainer, on generated data. In step 6 rank 1 hangs once; step 8 always raises on rank 1.
HANG_AND_FAIL = """
import os, pathlib, sys, time
import training_code
from swarmtrain.trainer.custom import model_loop
from swarmtrain.trainer.health import stop_flag, watchdog
from swarmtrain.trainer.data import memory_map

stop_flag._MIN_SECONDS, stop_flag._MAX_SECONDS, watchdog.MARGIN_SECONDS, watchdog.POLL_SECONDS = 2.0, 2.0, 1.0, 0.2
compute_gradients, hung = model_loop.compute_gradients, pathlib.Path(sys.argv[1])

def fail(*args):
    step = args[-1].number
    if os.environ["RANK"] == "1":
        if step == 6 and not hung.exists():
            hung.touch()
            lie_down()
        if step == 8:
            raise ValueError(f"a row of {id(args)} letters")
    return compute_gradients(*args)

def lie_down():
    time.sleep(600)

model_loop.compute_gradients = fail
training_code.main()
"""


def test_a_rank_that_hangs_prints_where_and_a_bug_is_recognized_the_second_time(small_run: Any) -> None:
    folder = small_run.folder
    memory_map.write_token_files(folder / "train", [np.arange(4000) % 7], "uint8")
    config = {
        "topology": {"global_batch_size": 4, "micro_batch_size": 1},
        "trainer": {"train_iterations": 1000, "save_dir": str(folder / "run"), "save_interval": 1},
        "data": {"data_prefixes": [str(folder / "train")]},
        "transformer_architecture": {"vocab_size": 8, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 16},
    }
    (folder / "config.json").write_text(Config.from_json(json.dumps(config)).model_dump_json())
    small_run.start_coordinator(max_restarts=50)
    for number in (0, 1):
        small_run.start_node(number, HANG_AND_FAIL, str(folder / "hung"), slots=1)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}

    first, *_ = [event.data for event in small_run.read_events("failure") if "hangs" in event.data["error"]]
    assert first["error"].startswith("hangs in step 6, for ")
    assert first["error"].endswith("× the usual step time, in lie_down, script.py line 22")
    assert "in fail" in first["traceback"]
    assert first["rank"] == 1
    assert "Current thread" in small_run.read_output()
    assert "in lie_down" in small_run.read_output()

    same = [event.data for event in small_run.read_events("failure") if "letters" in event.data["error"]]
    assert [data["step"] for data in same] == [8, 8]
    verdict = small_run.read_events("outcome")[0].data
    assert verdict["status"] == "failed"
    assert verdict["reason"].endswith("same error at the same step as before: not a machine fault")


def test_a_node_that_can_never_work_ends_the_run_at_once(small_run: Any) -> None:
    small_run.start_coordinator()
    small_run.start_node(0, "import this is no python", node_range=(1, 1), slots=1)
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    verdict = small_run.read_events("outcome")[0].data
    assert verdict["reason"].startswith("node0 rank 0: SyntaxError: invalid syntax, in script.py line 1; retrying would not help")
    assert len(small_run.read_events("world")) == len(small_run.read_events("failure")) == 1


def test_a_rank_that_exits_by_os_exit_has_finished(small_run: Any) -> None:
    """torch's agent waits for return values, so without our handling it would wait forever."""
    script = (
        "import atexit, os\natexit.register(print, 'not at os._exit')\n"
        "if os.fork() == 0: os._exit(7)\n"
        "os.wait()\nprint('bye', flush=True)\nos._exit(0)\n"
    )
    small_run.start_coordinator()
    small_run.start_node(0, script, node_range=(1, 1), slots=2)
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    assert small_run.read_events("outcome")[0].data["reason"] == "its node has finished"
    assert small_run.read_output().count("bye\n") == 2
    assert "not at os._exit" not in small_run.read_output()


WORLDS_LEFT_EARLY = """
import os, sys
import torch, torch.distributed as dist

def train(number):
    store = f"file://{sys.argv[1]}/store-{number}"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))))
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()
    dist.destroy_process_group()  # the model still has the group

for number in range(60):
    train(number)
print("sixty times")
"""


def test_a_script_can_destroy_its_process_group_before_its_model(small_run: Any) -> None:
    """Unless process groups are kept alive, gloo's destructor hangs in most such runs, within seconds."""
    small_run.start_coordinator(min_nodes=1)
    small_run.start_node(0, WORLDS_LEFT_EARLY, str(small_run.folder), node_range=(1, 1))
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    assert small_run.read_output().count("sixty times") == 2


def test_a_rank_that_has_returned_ends_at_once_whatever_its_script_did_with_sigterm(small_run: Any) -> None:
    """The rank waits for its agent to fetch its return value; torch would wait 16 s for it to exit."""
    script = (
        "import os, signal, sys, time\n"
        "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "while os.environ['RANK'] == '1' and not asked: time.sleep(0.05)\n"
        "print('rank', os.environ['RANK'], 'returns', flush=True)\n"
        "sys.exit(75 * len(asked))\n"
    )
    small_run.start_coordinator()
    small_run.start_node(0, script, node_range=(1, 1), slots=2)
    while "rank 0 returns" not in small_run.read_output():
        time.sleep(0.1)
    time.sleep(1)  # until its process has returned to torch's code
    asked = time.monotonic()
    small_run.nodes["node0"].terminate()
    assert small_run.nodes["node0"].wait(60) == EXIT_PLANNED
    assert time.monotonic() - asked < 12


def test_four_ranks_that_fail_alike_print_their_traceback_once(small_run: Any) -> None:
    script = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that is slower to fail is not stopped first\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / f'rank-{os.environ[\"RANK\"]}').touch()\n"
        "while len(list(here.glob('rank-*'))) < 4: time.sleep(0.01)\n"
        "import no_such_module\n"
    )
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_node(number, script)
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    verdict = small_run.read_events("outcome")[0].data
    assert verdict["reason"].endswith("'no_such_module', in script.py line 6; retrying would not help")
    assert verdict["hint"].startswith("install it in the image")
    assert small_run.read_output().count("Traceback") == 1
    assert small_run.read_output().count("ModuleNotFoundError: No module named 'no_such_module'") >= 4
    assert len(small_run.read_events("world")) <= 1


def test_sigterm_reaches_the_ranks_which_save_and_the_node_requests_a_restart(small_run: Any, wait_until_dead: WaitUntilDead) -> None:
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number)
    small_run.wait_for_event("progress")
    family = list(small_run.find_descendants(0)) + list(small_run.find_descendants(1))
    for supervisor in small_run.nodes.values():
        supervisor.terminate()
    assert [supervisor.wait(20) for supervisor in small_run.nodes.values()] == [EXIT_PLANNED, EXIT_PLANNED]
    wait_until_dead(family)
    saved = small_run.state.read_text()
    assert small_run.read_output().count(f"saved {saved}\n") == 4
    assert not small_run.read_events("failure")
    assert [event.data["exit_code"] for event in small_run.read_events("left")] == [EXIT_PLANNED, EXIT_PLANNED]
    small_run.coordinator.terminate()
    assert small_run.coordinator.wait(10) == 143


@pytest.mark.test_all_only("one more life of a run; tests/contract scales a run")
def test_a_third_node_joins_and_no_step_is_lost(small_run: Any) -> None:
    small_run.start_coordinator()
    for number in (0, 1):
        small_run.start_training_node(number, slots=1, node_range=(1, 3))
    small_run.wait_for_event("progress", condition=lambda event: event.data["step"] >= 10)
    small_run.start_training_node(2, slots=1, node_range=(1, 3))
    world = small_run.wait_for_event("world", condition=lambda event: event.data["nodes"] == 3)
    assert sorted(world.data["ranks"]) == ["node0", "node1", "node2"]
    assert small_run.finish_training(worlds=len(small_run.read_events("world"))) == {"node0": 0, "node1": 0, "node2": 0, "coordinator": 0}
    starts = [line for line in small_run.read_output().splitlines() if "of world 3" in line]
    saves = [int(line.split()[-1]) for line in small_run.read_output().splitlines() if "saved" in line]
    assert len(starts) == 3
    assert {f"start at {max(saves)} of world 3"} == {line.partition("] ")[2] for line in starts}


def test_a_module_is_run_as_python_m_runs_it(small_run: Any) -> None:
    """Its package is in the working folder of the node."""
    package = small_run.folder / "trains" / "deep"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "other.py").write_text("NAME = 'relative'\n")
    (package / "loop.py").write_text(
        "import sys\nfrom .other import NAME\n"
        "if __name__ == '__main__': print(f'{__package__} {NAME} {sys.argv[1:]} {sys.argv[0].endswith(\"loop.py\")}', flush=True)\n"
    )
    small_run.start_coordinator()
    module = {"SWARMTRAIN_MODULE": "trains.deep.loop", "SWARMTRAIN_SCRIPT": ""}
    small_run.start_node(0, "", "--lr", "1", node_range=(1, 1), slots=1, environment=module)
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    assert "trains.deep relative ['--lr', '1'] True" in small_run.read_output()


def test_a_script_in_a_folder_imports_from_its_folder_and_from_the_top(small_run: Any) -> None:
    for name, text in {
        "train/script.py": "import beside, top\nprint(beside.NAME, top.NAME, flush=True)\nbeside.fail()\n",
        "train/beside.py": "NAME = 'beside'\ndef fail():\n    raise ValueError('as planned')\n",
        "top.py": "NAME = 'top'\n",
        "beside.py": "NAME = 'the wrong one'\n",
    }.items():
        (small_run.folder / name).parent.mkdir(exist_ok=True)
        (small_run.folder / name).write_text(text)
    small_run.start_coordinator(max_restarts=0)
    script = {"SWARMTRAIN_SCRIPT": str(small_run.folder / "train/script.py")}
    small_run.start_node(0, "", node_range=(1, 1), slots=1, environment=script)
    small_run.wait_for_exit()
    assert "beside top" in small_run.read_output()
    assert "ValueError: as planned, in train/beside.py line 3" in small_run.read_events("outcome")[0].data["reason"]


def test_a_module_that_is_not_installed_ends_the_run_at_once(small_run: Any) -> None:
    small_run.start_coordinator()
    module = {"SWARMTRAIN_MODULE": "nowhere.loop", "SWARMTRAIN_SCRIPT": ""}
    small_run.start_node(0, "", node_range=(1, 1), slots=1, environment=module)
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    outcome = small_run.read_events("outcome")[0].data
    assert "No module named 'nowhere'" in outcome["reason"]
    assert outcome["reason"].endswith("retrying would not help")
