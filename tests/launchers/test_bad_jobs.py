"""Jobs that cannot work: scripts, data, checkpoints. By the local launcher with real ranks, or as one process where that shows the same."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from answers import ROOT, Answer
from processes import below

pytestmark = pytest.mark.test_all_only("one mistake per run; the gate has the mistakes that need no run")

pytest.importorskip("torch", reason="ranks need torch")

CHAPTER = "Scripts and checkpoints"
TWO_RANKS = "runner: {runner_type: local, default_gpu_count: 2}\n"
TRAIN = """\
runner: {runner_type: local, code: [datautils.py]}
topology: {global_batch_size: 4, micro_batch_size: 1}
trainer: {train_iterations: 4, save_dir: runs, save_interval: 2}
transformer_architecture: {vocab_size: 64, hidden_size: 32, num_layers: 1, num_attention_heads: 2, sequence_length: 16}
data: {data_prefixes: [data/words]}
"""
TWO = " -o runner.default_gpu_count=2"
RUN = r"^home/|^project/runs"


@pytest.fixture(autouse=True)
def _processes_end(answer: Answer) -> Iterator[None]:
    """One thread a rank, no GPU, and at the end no process is left."""
    answer.forked = True
    answer.env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    yield
    for _ in range(2):
        for process in below(answer.home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def training(answer: Answer) -> None:
    """Let the project train for four steps on 400 tokens, with a checkpoint at the second and the fourth."""
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(ROOT / name, answer.project)
    write_tokens(answer.project / "data" / "words", bytes(index * 7 % 64 for index in range(400)))
    answer.config(TRAIN)


def write_tokens(prefix: Path, tokens: bytes) -> None:
    """Write one document of tokens, a byte each."""
    prefix.parent.mkdir(exist_ok=True)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(struct.pack("<2q", 0, len(tokens)))
    meta = {"dtype": "uint8", "index_dtype": "int64", "document_count": 1}
    prefix.with_name(f"{prefix.name}.meta.json").write_text(json.dumps(meta))


def deploy(answer: Answer, *, code: int = 3, status: bool = False, override: str = "") -> str:
    """Deploy, follow to the end, show how it ended; return what the ranks printed."""
    answer.same(r"· a world of .*\n", "")  # two ranks may be through before both have said that they are there
    done = answer(f"swarmtrain deploy config.yml{override}", code=code, since=r"^· node0 rank \d failed", changes=RUN)
    if status:
        why = done.stderr.split(" failed with exit code ")[1].partition(": ")[2].splitlines()[0]
        shown = answer("swarmtrain status", code=0, only=r"^run |^  hint", changes=RUN)
        assert why in shown.stdout
    assert answer("swarmtrain down", code=0, show=False, changes=RUN).returncode == 0
    assert below(answer.home) == []
    return done.stdout


def test_script_fails_at_import(answer: Answer) -> None:
    """A script that fails at import

    Of all ranks one shows its traceback. A module that is missing does not come by trying again, so that the run ends at once.
    """
    answer.config(TWO_RANKS)
    answer.file("training_code.py", "import nothing_like_it\n")
    answer.same(r"rank \d", "rank 0")
    output = deploy(answer, status=True)
    assert output.count("Traceback") == 1
    assert "import nothing_like_it" in output


def test_script_is_no_python(answer: Answer) -> None:
    """A script that is not Python

    A syntax error, in the script or in a file beside it, ends the run at once.
    """
    answer.config(TWO_RANKS)
    answer.file("training_code.py", "def train(:\n    pass\n")
    answer.same(r"rank \d", "rank 0")
    assert deploy(answer).count("Traceback") == 1


def test_one_rank_fails(answer: Answer) -> None:
    """A rank that fails

    An error of the script's own may pass, so it is tried again, `max_restarts` times without a new step between. Its traceback is in
    the ranks' output, once a try.
    """
    answer.config("runner: {runner_type: local, default_gpu_count: 2, max_restarts: 1}")
    answer.file(
        "training_code.py", 'import os, time\n\nif os.environ["RANK"] == "1":\n    raise ValueError("no such thing")\ntime.sleep(60)\n'
    )
    assert deploy(answer).count("Traceback") == 2


def test_script_exits(answer: Answer) -> None:
    """A script that exits with a code of its own

    The code is in the message, and in `--json`; swarmtrain's own is 3.
    """
    answer.config("runner: {runner_type: local, max_restarts: 0}")
    answer.file("training_code.py", "import sys\n\nsys.exit(5)\n")
    output = deploy(answer, override=" --json")
    assert json.loads(output[output.index("{") :])["exit_code"] == 5


def test_no_torch(answer: Answer) -> None:
    """No torch

    Ranks of a local run use the Python that swarmtrain runs on; elsewhere it is the image's.
    """
    answer.config(TWO_RANKS)
    packages = answer.project.parent / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("torch", "swarmtrain", "_", "__editable__")):
            (packages / path.name).symlink_to(path)
    python = answer.project.parent / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    answer.forked, answer.python = False, str(python)
    answer.env["PYTHONPATH"] = f"{ROOT}:{packages}"
    answer.same(r"/\S+ cannot find", "/usr/bin/python3 cannot find")
    answer("swarmtrain deploy config.yml", since="^error")
    assert not list((answer.home / "state").rglob("*"))


def test_ports_in_use(answer: Answer) -> None:
    """A port in use

    The store listens on `master_port`, the notice board on the next one. In a swarm nobody else is in the run's own network; a local run
    takes ports that are free.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        values = {
            "RUN": "demo",
            "BOARD_PORT": port,
            "STORE_PORT": 1,
            "BIND": "127.0.0.1",
            "MAX_RESTARTS": 0,
            "MAX_RESTARTS_PER_HOUR": 0,
            "MIN_NODES": 1,
        }
        answer.env |= {f"SWARMTRAIN_{name}": str(value) for name, value in values.items()}
        answer("python -m swarmtrain.entrypoint rendezvous")
        answer.say("Without a store nobody can meet, which the board still can say: the run has failed.")
        answer.env |= {"SWARMTRAIN_BOARD_PORT": str(port + 1), "SWARMTRAIN_STORE_PORT": str(port)}
        done = answer("python -m swarmtrain.entrypoint rendezvous", code=0)
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "failed"


def test_missing_data(answer: Answer) -> None:
    """Data that is not there

    Before a run has made its first step, what is missing is not waited for.
    """
    training(answer)
    for path in (answer.project / "data").iterdir():
        path.unlink()
    assert deploy(answer).count("Traceback") == 0


def test_bad_data(answer: Answer) -> None:
    """Data that does not fit

    Empty, torn, or with tokens that the model does not know. The same script runs as one process without a launcher.
    """
    training(answer)
    data = answer.project / "data"
    for tokens, index in ((b"", 0), (bytes(300), 400)):
        write_tokens(data / "words", tokens)
        (data / "words.idx").write_bytes(struct.pack("<2q", 0, index))
        answer.say(f"With {len(tokens)} tokens, and an index that says {index}:")
        answer("python training_code.py config.yml", changes=RUN)
    answer.say("With an index of an odd length:")
    (data / "words.idx").write_bytes(b"12345")
    answer("python training_code.py config.yml", changes=RUN)
    answer.say("With the token 200, and a vocabulary of 64:")
    write_tokens(data / "words", bytes([1, 200] * 200))
    answer("python training_code.py config.yml", changes=RUN)
    answer.say("With a meta file that is no JSON:")
    (data / "words.meta.json").write_text("{")
    answer("python training_code.py config.yml", changes=RUN)


def test_tokens_in_the_middle(answer: Answer) -> None:
    """A token outside the vocabulary, in the middle of a file

    The ranks look through the files before the first step, each at a part. What one of them finds all of them raise: one tells it, and
    trying again is of no use.
    """
    training(answer)
    write_tokens(answer.project / "data" / "words", bytes(5 << 19) + b"\xc8" + bytes(5 << 19))
    answer.same(r"rank \d", "rank 0")
    output = deploy(answer, override=TWO)
    assert (output.count("error: "), output.count("ends after another rank: ")) == (1, 1), output


def test_data_on_some_nodes(answer: Answer) -> None:
    """Data that one rank does not find

    It tells so. Ranks that wait for it by then are ended, and have nothing to say.
    """
    training(answer)
    answer.file(
        "elsewhere.py", 'import os\n\nimport training_code\n\nif os.environ["RANK"] == "1":\n    os.chdir("/")\ntraining_code.main()\n'
    )
    output = deploy(answer, override=f"{TWO} -o runner.script=elsewhere.py -o runner.code=[training_code.py,datautils.py]")
    assert (output.count("error: "), output.count("Traceback")) == (1, 0), output


def test_no_room_for_the_model(answer: Answer) -> None:
    """Out of memory

    What was asked for, and what needs less; in a step also what has the room so far. On a GPU the first is in torch's words.
    """
    training(answer)
    answer.same(r"rank \d", "rank 0")
    output = deploy(answer, override=f"{TWO} -o transformer_architecture.vocab_size={2**42}")  # more than a process can address
    assert (output.count("error: "), output.count("Traceback")) == (1, 0), output


def test_save_dir(answer: Answer) -> None:
    """A save_dir that cannot be written

    It is tried out before the first step.
    """
    training(answer)
    answer.situation("echo 'in the way' > runs")
    assert deploy(answer).count("Traceback") == 0


def test_disk_full(answer: Answer) -> None:
    """A disk that is full when a checkpoint is saved

    What is half written is never taken for a checkpoint; those that are whole stay. (Here a limit of the file size plays the full disk.)
    """
    training(answer)
    answer("python training_code.py config.yml -o trainer.train_iterations=2", code=0, show=False, changes=RUN)
    answer.say("There is a checkpoint of step 2, and no room for another:")
    answer.limits = {resource.RLIMIT_FSIZE: 50_000}
    answer("python training_code.py config.yml", changes=RUN)
    assert [path.name for path in (answer.project / "runs").glob("step-*")] == ["step-00000002"]
    answer.limits = {}
    answer.say("With room again it goes on from there:")
    answer("python training_code.py config.yml", code=0, only="goes on|^done", changes=RUN)


def test_torn_checkpoints(answer: Answer) -> None:
    """A torn checkpoint

    The newest checkpoint that is whole is taken. What is passed over is named, with the reason, among the ranks' output and on the notice
    board.
    """
    training(answer)
    saved = "trainer.train_iterations=7 -o trainer.save_interval=1 -o trainer.keep_checkpoints=9"
    answer(f"python training_code.py config.yml -o {saved}", code=0, show=False, changes=RUN)
    answer.say("Of seven checkpoints the first one alone is left whole:")
    shown = (
        ("truncate -s 1000", "part-00000.bin"),
        ("sh -c 'printf X | dd of=$0 bs=1 seek=1000 conv=notrunc'", "part-00000.bin"),
        ("rm", "part-00000.bin"),
        ("rm", "manifest.json"),
        ("truncate -s 1000", "manifest.json"),
        ('sed -i \'s/"step": 6/"step": 7/\'', "manifest.json"),
    )
    for step, (damage, name) in enumerate(shown, 2):
        answer.situation(f"{damage} runs/step-{step:08}/{name}")
    answer("python training_code.py config.yml", code=0, only="passed over|goes on", changes=RUN)
    answer.say("With none that is whole, the run starts from nothing:")
    answer.situation("for step in runs/step-*; do echo '{' > $step/manifest.json; done")
    answer("python training_code.py config.yml", code=0, only="passed over|counts as empty|goes on", changes=RUN)


def test_nothing_to_load(answer: Answer) -> None:
    """A load_dir without a checkpoint

    The run does not quietly begin anew.
    """
    training(answer)
    answer("python training_code.py config.yml -o trainer.load_dir=runs/pretraned", changes=RUN)


def test_another_model(answer: Answer) -> None:
    """A checkpoint of another model

    Of another width, another depth, another vocabulary. Nothing is overwritten, and nothing is tried again.
    """
    training(answer)
    answer("python training_code.py config.yml", code=0, show=False, changes=RUN)
    for other in ("num_layers=2", "vocab_size=128"):
        done = answer(f"python training_code.py config.yml -o transformer_architecture.{other}", changes=r"^project/runs/fence")
        assert "step-00000004" in done.stderr
    answer.say("As a run it fails at once, and `status` says why:")
    deploy(answer, status=True, override=" -o transformer_architecture.hidden_size=64")
    assert sorted(path.name for path in (answer.project / "runs").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_other_data(answer: Answer) -> None:
    """A checkpoint of other data

    The order of samples would mean something else.
    """
    training(answer)
    answer("python training_code.py config.yml", code=0, show=False, changes=RUN)
    answer.situation("head -c 400 /dev/zero > data/words.bin")
    answer("python training_code.py config.yml", changes=r"^project/runs/fence")


def test_options(answer: Answer) -> None:
    """Options of the script

    The section `script` is the script's own, checked by its own class, and answered like the rest. Started alone, a script needs a config.
    """
    training(answer)
    answer("python training_code.py config.yml -o script.dataset=wikipedia -o script.speed=9", hint=False)
    answer("python training_code.py")
