"""Jobs that cannot work: scripts, data, checkpoints. They run on the local launcher with real ranks, or as one process if that suffices."""

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
from error_cases import ROOT, ErrorCase
from processes import find_run_pids

from swarmtrain.protocol import PROTOCOL_VERSION

pytestmark = pytest.mark.test_all_only("one mistake per run; the gate has the mistakes that need no run")

pytest.importorskip("torch", reason="ranks need torch")

CHAPTER = "Scripts and checkpoints"
TWO_RANKS = "runner: {runner_type: local, default_gpu_count: 2}\n"
TRAIN_CONFIG = """\
runner: {runner_type: local, code: [datautils.py]}
topology: {global_batch_size: 4, micro_batch_size: 1}
trainer: {train_iterations: 4, save_dir: runs, save_interval: 2}
transformer_architecture: {vocab_size: 64, hidden_size: 32, num_layers: 1, num_attention_heads: 2, sequence_length: 16}
data: {data_prefixes: [data/words]}
"""
TWO_RANKS_OPTION = " -o runner.default_gpu_count=2"
RUN_FILES = r"^home/|^project/runs"


@pytest.fixture(autouse=True)
def _kill_leftovers(error_case: ErrorCase) -> Iterator[None]:
    """Use one thread per rank and no GPU, and kill leftover processes at the end."""
    error_case.use_preloaded_fork = True
    error_case.env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    yield
    for _ in range(2):
        for process in find_run_pids(error_case.home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def prepare_training(error_case: ErrorCase) -> None:
    """Set up the project to train for four steps on 400 tokens, with a checkpoint at the second and the fourth."""
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(ROOT / name, error_case.project)
    write_tokens(error_case.project / "data" / "words", bytes(index * 7 % 64 for index in range(400)))
    error_case.write_config(TRAIN_CONFIG)


def write_tokens(prefix: Path, tokens: bytes) -> None:
    """Write token files with one document, a byte per token."""
    prefix.parent.mkdir(exist_ok=True)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(struct.pack("<2q", 0, len(tokens)))
    meta = {"dtype": "uint8", "index_dtype": "int64", "document_count": 1}
    prefix.with_name(f"{prefix.name}.meta.json").write_text(json.dumps(meta))


def deploy_to_end(error_case: ErrorCase, *, code: int = 3, show_status: bool = False, override: str = "") -> str:
    """Deploy, follow the run to its end, show how it ended; return what the ranks printed."""
    error_case.add_replacement(r"· [\d:]+ a world of .*\n", "")  # two ranks may end before both have reported that they joined
    result = error_case(
        f"swarmtrain deploy config.yml{override}", code=code, start_pattern=r"^· [\d:]+ node0 rank \d failed", allowed_changes=RUN_FILES
    )
    if show_status:
        why = result.stderr.split(" failed with exit code ")[1].partition(": ")[2].splitlines()[0]
        shown = error_case("swarmtrain status", code=0, line_pattern=r"^run |^  hint", allowed_changes=RUN_FILES)
        assert why in shown.stdout
    assert error_case("swarmtrain down", code=0, show=False, allowed_changes=RUN_FILES).returncode == 0
    assert find_run_pids(error_case.home) == []
    return result.stdout


def test_script_fails_at_import(error_case: ErrorCase) -> None:
    """Script fails with an import error

    Only one of all ranks prints its traceback. Retries cannot fix a missing module, so the run fails at once.
    """
    error_case.write_config(TWO_RANKS)
    error_case.write_file("training_code.py", "import nothing_like_it\n")
    error_case.add_replacement(r"rank \d", "rank 0")
    output = deploy_to_end(error_case, show_status=True)
    assert output.count("Traceback") == 1
    assert "import nothing_like_it" in output


def test_script_is_not_python(error_case: ErrorCase) -> None:
    """Script has a syntax error

    A syntax error in the script, or in a file next to it, fails the run at once.
    """
    error_case.write_config(TWO_RANKS)
    error_case.write_file("training_code.py", "def train(:\n    pass\n")
    error_case.add_replacement(r"rank \d", "rank 0")
    assert deploy_to_end(error_case).count("Traceback") == 1


def test_one_rank_fails(error_case: ErrorCase) -> None:
    """One rank fails

    An error in the script may be transient, so the run is restarted up to `max_restarts` times without a new step between. The output of
    the ranks has the traceback once per attempt.
    """
    error_case.write_config("runner: {runner_type: local, default_gpu_count: 2, max_restarts: 1}")
    error_case.write_file(
        "training_code.py", 'import os, time\n\nif os.environ["RANK"] == "1":\n    raise ValueError("no such thing")\ntime.sleep(60)\n'
    )
    assert deploy_to_end(error_case).count("Traceback") == 2


def test_script_exits(error_case: ErrorCase) -> None:
    """Script exits with its own exit code

    The script's exit code is in the message and in `--json`. The exit code of swarmtrain is 3.
    """
    error_case.write_config("runner: {runner_type: local, max_restarts: 0}")
    error_case.write_file("training_code.py", "import sys\n\nsys.exit(5)\n")
    output = deploy_to_end(error_case, override=" --json")
    assert json.loads(output[output.index("{") :])["exit_code"] == 5


def test_no_torch(error_case: ErrorCase) -> None:
    """torch is not installed

    Ranks of a local run use the Python interpreter that runs swarmtrain. In containers, they use the image's.
    """
    error_case.write_config(TWO_RANKS)
    packages = error_case.project.parent / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("torch", "swarmtrain", "_", "__editable__")):
            (packages / path.name).symlink_to(path)
    python = error_case.project.parent / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    error_case.use_preloaded_fork, error_case.python = False, str(python)
    error_case.env["PYTHONPATH"] = f"{ROOT}:{packages}"
    error_case.add_replacement(r"/\S+ cannot find", "/usr/bin/python3 cannot find")
    error_case("swarmtrain deploy config.yml", start_pattern="^error")
    assert not list((error_case.home / "state").rglob("*"))


def test_ports_in_use(error_case: ErrorCase) -> None:
    """Port is in use

    The coordinator listens on `master_port`. In a swarm, the run's own network has no other users. A local run chooses a free port.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        values = {
            "PROTOCOL": PROTOCOL_VERSION,
            "RUN": "demo",
            "COORDINATOR_PORT": port,
            "BIND": "127.0.0.1",
            "MAX_RESTARTS": 0,
            "MAX_RESTARTS_PER_HOUR": 0,
            "MIN_NODES": 1,
            "RUN_ID": "",
            "KEY_FILE": "",
        }
        error_case.env |= {f"SWARMTRAIN_{name}": str(value) for name, value in values.items()}
        error_case("python -m swarmtrain.entrypoint rendezvous")


def test_missing_data(error_case: ErrorCase) -> None:
    """Training data is missing

    Until a run has completed its first step, it does not wait for missing files: the run fails at once.
    """
    prepare_training(error_case)
    for path in (error_case.project / "data").iterdir():
        path.unlink()
    assert deploy_to_end(error_case).count("Traceback") == 0


def test_bad_data(error_case: ErrorCase) -> None:
    """Invalid training data

    A token file is empty or corrupt, or contains tokens that are not in the vocabulary. Here the script runs as one process, without a
    launcher.
    """
    prepare_training(error_case)
    data = error_case.project / "data"
    for tokens, index in ((b"", 0), (bytes(300), 400)):
        write_tokens(data / "words", tokens)
        (data / "words.idx").write_bytes(struct.pack("<2q", 0, index))
        error_case.add_paragraph(f"The file has {len(tokens)} tokens, the index says {index}:")
        error_case("python training_code.py config.yml", allowed_changes=RUN_FILES)
    error_case.add_paragraph("The length of the index is not a multiple of the size of its numbers:")
    (data / "words.idx").write_bytes(b"12345")
    error_case("python training_code.py config.yml", allowed_changes=RUN_FILES)
    error_case.add_paragraph("The data contains token 200, and the vocabulary size is 64:")
    write_tokens(data / "words", bytes([1, 200] * 200))
    error_case("python training_code.py config.yml", allowed_changes=RUN_FILES)
    error_case.add_paragraph("The meta file is not valid JSON:")
    (data / "words.meta.json").write_text("{")
    error_case("python training_code.py config.yml", allowed_changes=RUN_FILES)


def test_tokens_in_the_middle(error_case: ErrorCase) -> None:
    """Token outside the vocabulary

    The token is in the middle of a file. Before the first step, each rank scans a part of the files. If one rank finds an invalid token,
    all ranks raise the error: one of them reports it, and the run is not retried, since that would not help.
    """
    prepare_training(error_case)
    write_tokens(error_case.project / "data" / "words", bytes(5 << 19) + b"\xc8" + bytes(5 << 19))
    error_case.add_replacement(r"rank \d", "rank 0")
    output = deploy_to_end(error_case, override=TWO_RANKS_OPTION)
    assert (output.count("error: "), output.count("exits after another rank failed: ")) == (1, 1), output


def test_data_on_some_nodes(error_case: ErrorCase) -> None:
    """Training data is missing on one rank

    This rank reports the error. Ranks that are already waiting for it are terminated, and report nothing.
    """
    prepare_training(error_case)
    error_case.write_file(
        "elsewhere.py", 'import os\n\nimport training_code\n\nif os.environ["RANK"] == "1":\n    os.chdir("/")\ntraining_code.main()\n'
    )
    output = deploy_to_end(
        error_case, override=f"{TWO_RANKS_OPTION} -o runner.script=elsewhere.py -o runner.code=[training_code.py,datautils.py]"
    )
    assert (output.count("error: "), output.count("Traceback")) == (1, 0), output


def test_no_memory_for_the_model(error_case: ErrorCase) -> None:
    """Out of memory

    The error shows how much memory was requested and which settings need less. During a step, it also shows what is allocated. On a GPU,
    the first part is torch's own message.
    """
    prepare_training(error_case)
    error_case.add_replacement(r"rank \d", "rank 0")
    output = deploy_to_end(
        error_case, override=f"{TWO_RANKS_OPTION} -o transformer_architecture.vocab_size={2**42}"
    )  # more than the address space of a process
    assert (output.count("error: "), output.count("Traceback")) == (1, 0), output


def test_save_dir(error_case: ErrorCase) -> None:
    """save_dir is not writable

    swarmtrain tests `save_dir` before the first step.
    """
    prepare_training(error_case)
    error_case.run_setup("echo 'in the way' > runs")
    assert deploy_to_end(error_case).count("Traceback") == 0


def test_disk_full(error_case: ErrorCase) -> None:
    """Disk is full while a checkpoint is saved

    A partially written checkpoint is never used, and complete checkpoints are kept. (Here a file size limit simulates the full disk.)
    """
    prepare_training(error_case)
    error_case("python training_code.py config.yml -o trainer.train_iterations=2", code=0, show=False, allowed_changes=RUN_FILES)
    error_case.add_paragraph("A checkpoint of step 2 exists, and the disk has no space for another:")
    error_case.resource_limits = {resource.RLIMIT_FSIZE: 50_000}
    error_case("python training_code.py config.yml", allowed_changes=RUN_FILES)
    assert [path.name for path in (error_case.project / "runs").glob("step-*")] == ["step-00000002"]
    error_case.resource_limits = {}
    error_case.add_paragraph("Once there is space again, training resumes from that checkpoint:")
    error_case("python training_code.py config.yml", code=0, line_pattern="resuming|^done", allowed_changes=RUN_FILES)


def test_corrupt_checkpoints(error_case: ErrorCase) -> None:
    """Checkpoint is corrupt

    The run resumes from the newest complete checkpoint. Each skipped checkpoint is reported with the reason, in the output of the ranks and
    to the coordinator.
    """
    prepare_training(error_case)
    saved = "trainer.train_iterations=7 -o trainer.save_interval=1 -o trainer.keep_checkpoints=9"
    error_case(f"python training_code.py config.yml -o {saved}", code=0, show=False, allowed_changes=RUN_FILES)
    error_case.add_paragraph("Of seven checkpoints, those of steps 2 to 6 are damaged:")
    shown = (
        ("truncate -s 1000", "part-00000.bin"),
        ("sh -c 'printf X | dd of=$0 bs=1 seek=1000 conv=notrunc'", "part-00000.bin"),
        ("rm", "part-00000.bin"),
        ("rm", "manifest.json"),
        ("truncate -s 1000", "manifest.json"),
        ('sed -i \'s/"step": 6/"step": 7/\'', "manifest.json"),
    )
    for step, (damage, name) in enumerate(shown, 2):
        error_case.run_setup(f"{damage} runs/step-{step:08}/{name}")
    error_case("python training_code.py config.yml", code=0, line_pattern="skipped|resuming", allowed_changes=RUN_FILES)
    error_case.add_paragraph("If no checkpoint is complete, training starts from scratch:")
    error_case.run_setup("for step in runs/step-*; do echo '{' > $step/manifest.json; done")
    error_case("python training_code.py config.yml", code=0, line_pattern="skipped|treated as empty|resuming", allowed_changes=RUN_FILES)


def test_nothing_to_load(error_case: ErrorCase) -> None:
    """No checkpoint in load_dir

    The run fails. It does not silently start from scratch.
    """
    prepare_training(error_case)
    error_case("python training_code.py config.yml -o trainer.load_dir=runs/pretraned", allowed_changes=RUN_FILES)


def test_another_model(error_case: ErrorCase) -> None:
    """Checkpoint of another model

    The model has another width, depth or vocabulary size. Nothing is overwritten, and the run is not retried.
    """
    prepare_training(error_case)
    error_case("python training_code.py config.yml", code=0, show=False, allowed_changes=RUN_FILES)
    for other in ("num_layers=2", "vocab_size=128"):
        done = error_case(f"python training_code.py config.yml -o transformer_architecture.{other}", allowed_changes=r"^project/runs/fence")
        assert "step-00000004" in done.stderr
    error_case.add_paragraph("A deployed run fails at once, and `status` shows the reason:")
    deploy_to_end(error_case, show_status=True, override=" -o transformer_architecture.hidden_size=64")
    assert sorted(path.name for path in (error_case.project / "runs").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_other_data(error_case: ErrorCase) -> None:
    """Checkpoint of other data

    With other data, the checkpoint's position in the order of samples would mean something else.
    """
    prepare_training(error_case)
    error_case("python training_code.py config.yml", code=0, show=False, allowed_changes=RUN_FILES)
    error_case.run_setup("head -c 400 /dev/zero > data/words.bin")
    error_case("python training_code.py config.yml", allowed_changes=r"^project/runs/fence")


def test_options(error_case: ErrorCase) -> None:
    """Invalid script options

    The section `script` belongs to the script. The script's own class checks it, and errors are reported like those of other sections. A
    script that is started directly needs a config.
    """
    prepare_training(error_case)
    error_case("python training_code.py config.yml -o script.dataset=wikipedia -o script.speed=9", expect_hint=False)
    error_case("python training_code.py")
