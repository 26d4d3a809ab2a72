"""Importing shell scripts: what is imported is what bash starts, and what is not certain is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmtrain import importers
from swarmtrain.errors import SwarmtrainError

FOLDER = Path(__file__).parent / "imports"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh"))
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3")
PREFIXES = ("srun", "mpirun", "apptainer", "singularity", "numactl", "uv")
OTHER_PROGRAMS = ("pip", "wandb", "huggingface-cli", "module", "conda", "scontrol", "nvidia-smi")
# A stub records its arguments; a prefix then starts the wrapped command.
STUB = """#!{python} -SE
import json, os, sys
name = os.path.basename(sys.argv[0])
with open({record!r}, "a") as file:
    file.write(json.dumps([[name, *sys.argv[1:]], dict(os.environ)]) + "\\n")
starts = {starts!r}
for word in sys.argv[1:]:
    if name == "srun" and word.startswith("--export="):
        os.environ.update(pair.split("=", 1) for pair in word[9:].split(",") if "=" in pair)
if name in {prefixes!r}:
    words = sys.argv[1:]
    start = next((index for index, word in enumerate(words) if os.path.basename(word) in starts), None)
    if start is not None:
        os.execvp(words[start], words[start:])
"""


def read_settings(text: str, kind: str) -> list[str]:
    """Return the lines `# KIND NAME=value` of a fixture."""
    return re.findall(rf"^# {kind} (.*)$", text, re.MULTILINE)


def import_script(
    text: str, name: str = "run.sh", *, settings: list[str] | None = None, line: int | None = None
) -> importers.ImportedConfig:
    arguments = read_settings(text, "--set") if settings is None else settings
    return importers.import_config_text(text, name, settings=importers.parse_script_settings(tuple(arguments), line))


def get_runner(text: str, **options: Any) -> dict[str, Any]:
    return dict(import_script(text, **options).result.values["runner"])


def refuse(text: str, **options: Any) -> str:
    with pytest.raises(SwarmtrainError) as raised:
        import_script(text, **options)
    return raised.value.plain_text


def run_in_bash(text: str, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Run the script under bash with stubs on PATH. Return the arguments and the environment of each stub that it started."""
    stubs, record, work = folder / "stubs", folder / "record", folder / "work"
    (work / "project" / "src").mkdir(parents=True)
    stubs.mkdir()
    record.touch()
    starts = (*LAUNCHERS, *PREFIXES, "bash", "sh", "env", "timeout", "stdbuf", "nohup", "time")
    source = STUB.format(python=sys.executable, record=str(record), starts=starts, prefixes=PREFIXES)
    for program in (*LAUNCHERS, *PREFIXES, *OTHER_PROGRAMS):
        (stubs / program).write_text(source)
        (stubs / program).chmod(0o755)
    variables = dict(setting.split("=", 1) for kind in ("--set", "env") for setting in read_settings(text, kind))
    positional = [variables.pop(str(index)) for index in range(1, 10) if str(index) in variables]
    # An assignment of the script to a variable of --set has no effect in an import.
    lines = [line for line in text.splitlines() if line.partition("=")[0] not in variables or "=" not in line]
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": "/home/me", "LD_LIBRARY_PATH": "", **variables}
    command = ["bash", "-c", "\n".join(lines), "run.sh", *positional]
    subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    records = [json.loads(line) for line in record.read_text().splitlines()]
    return [(argv, env) for argv, env in records]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "sbatch-torchrun.sh"])  # it needs files of a cluster
def test_an_imported_script_starts_what_bash_starts(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text()
    records = run_in_bash(text, tmp_path)
    runner = get_runner(text, name=name)
    script = Path(runner["module"] if "module" in runner else runner["script"]).name
    expected = runner.get("script_args", [])
    removed = [row.key for row in import_script(text, name).result.unmapped_keys if "(secret)" in row.key]
    started = [(argv, env) for argv, env in records if argv[0] in LAUNCHERS and script in [Path(word).name for word in argv]]
    assert started, [argv for argv, _ in records]
    for argv, env in started:
        start = next(index for index, word in enumerate(argv) if Path(word).name == script)
        assert ("-m" in argv[start - 1 : start]) == ("module" in runner)
        arguments = argv[start + 1 :]
        if removed:
            assert [word for word in arguments if word in expected] == expected
            assert 0 < len(arguments) - len(expected) <= 2 * len(removed)
        else:
            assert arguments == expected
        for variable, value in runner.get("env", {}).items():
            assert env.get(variable) == value or variable.startswith("ACCELERATE_")  # set by accelerate itself


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_imported_config_contains_no_shell_syntax(name: str) -> None:
    """In arguments that the script does not protect by quotes, which two fixtures do."""
    runner = get_runner((FOLDER / name).read_text(), name=name)
    words = [runner.get("script", ""), runner.get("module", ""), *runner.get("script_args", [])]
    protected = {"script-arrays.sh": {"single $quoted", "$quoted"}, "script-quotes.sh": {"dollar $x", "back`tick"}}.get(name, set())
    assert [word for word in words if re.search(r"\$[\w({]|`|<\w[\w -]*>", word) and word not in protected] == []


REPLACEMENTS = (
    "$UNKNOWN",
    "`date`",
    "<PLACEHOLDER>",
    "'",
    '"',
    "torchrun",
    "{",
    ")",
    "<<EOF",
    "${",
    "$((",
    "if",
    "done",
    "&&",
    "\\",
    "*.py",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_damaged_script_is_imported_or_refused(name: str) -> None:
    """Scripts that end at any line, and scripts with one word replaced: no other error, and no shell syntax in the config."""
    text = (FOLDER / name).read_text()
    lines = text.splitlines(keepends=True)
    words = list(re.finditer(r"\S+", text))
    replaced = zip(words, itertools.cycle(REPLACEMENTS), strict=False)
    damaged = ["".join(lines[:number]) for number in range(1, len(lines))]
    damaged += [text[: match.start()] + word + text[match.end() :] for match, word in replaced]
    for script in damaged:
        with contextlib.suppress(SwarmtrainError):
            runner = get_runner(script, name=name, settings=read_settings(text, "--set"))
            shown = [runner.get("script", ""), runner.get("module", ""), *runner.get("script_args", [])]
            assert not [word for word in shown if re.search(r"\$UNKNOWN|<PLACEHOLDER>|`date`|\ue000", word)]


STRONG = "srun torchrun --nproc_per_node=1 train.py"


@pytest.mark.parametrize(
    "line",
    [
        "python -m venv env",
        "python -c 'import torch'",
        "python3 -m pip install deepspeed",
        "python setup.py install",
        "python download_data.py",
        "pip install deepspeed torchrun",
        "echo torchrun other.py",
        "command -v torchrun",
        "deepspeed_dir=/opt/deepspeed",
        "ls deepspeed python torchrun",
        "srun hostname",
        "srun --ntasks=2 mkdir -p /scratch/x",
        "bash setup.sh",
        "./prepare.sh",
        "conda install deepspeed",
        "VERSION=$(python --version)",
        "WHERE=$(which torchrun)",
        "[ -x torchrun ] && echo yes",
        "ds_report",
        "accelerate config default",
        "python - <<END\nimport torch\nEND",
        "cat > hosts <<END\ntorchrun other.py\nEND",
        'echo "# torchrun other.py"',
        "srun python preprocess.py",
        "unused() { torchrun other.py; }",
    ],
)
def test_only_the_command_position_counts(line: str) -> None:
    for text in (f"{line}\n{STRONG} --deepspeed ds.json\n", f"{STRONG} --deepspeed ds.json\n{line}\n"):
        runner = get_runner(text)
        assert (runner["script"], runner["script_args"]) == ("train.py", ["--deepspeed", "ds.json"])


@pytest.mark.parametrize(
    ("text", "script", "arguments"),
    [
        ("FOO=1 env -u X BAR=2 torchrun a.py --x", "a.py", ["--x"]),
        ("srun -N 2 --ntasks 2 --mpi pmix -l torchrun --nnodes 2 a.py --x", "a.py", ["--x"]),
        ("mpirun -np 4 -x A=1 --map-by ppr:4:node --mca btl ^openib python a.py --x", "a.py", ["--x"]),
        ("nohup time -p timeout 10m nice -n 5 taskset -c 0-3 torchrun a.py --x > log 2>&1 &", "a.py", ["--x"]),
        ("srun singularity exec --nv -B /a:/b image.sif torchrun a.py --x", "a.py", ["--x"]),
        ('srun apptainer --silent exec image.sif bash -lc \'torchrun a.py --x "$0" "$@"\' zero one', "a.py", ["--x", "zero", "one"]),
        ("bash -c 'exec torchrun a.py --x'", "a.py", ["--x"]),
        ("uv run --with x torchrun a.py --x", "a.py", ["--x"]),
        ("uv run a.py --x", "a.py", ["--x"]),
        ("poetry run torchrun a.py --x", "a.py", ["--x"]),
        ("conda run -n env --no-capture-output torchrun a.py --x", "a.py", ["--x"]),
        ("/opt/venv/bin/torchrun a.py --x", "a.py", ["--x"]),
        ("$HOME/venv/bin/torchrun a.py --x", "a.py", ["--x"]),
        ("python -m torch.distributed.run --nproc-per-node 2 a.py --x", "a.py", ["--x"]),
        ("python -m torch.distributed.launch --nproc_per_node=2 --use-env a.py --x", "a.py", ["--x"]),
        ("python -m accelerate.commands.launch --num_processes 2 a.py --x", "a.py", ["--x"]),
        ("python -m deepspeed.launcher.runner --num_gpus=2 a.py --x", "a.py", ["--x"]),
        ("accelerate launch --fsdp_offload_params true --dynamo_backend no a.py --x", "a.py", ["--x"]),
        ("deepspeed --include localhost:0,1 --no_local_rank a.py --x", "a.py", ["--x"]),
        ("torchrun --nproc 2 --rdzv-backend c10d --rdzv-endpoint $HOST:1 -t 3 a.py --x", "a.py", ["--x"]),
        ("torchrun a.py --x | tee log", "a.py", ["--x"]),
        ("while true; do torchrun a.py --x && break; done", "a.py", ["--x"]),
        ("case $MODE in\n  a) torchrun a.py --x ;;\n  *) echo no ;;\nesac", "a.py", ["--x"]),
        ("(cd sub; torchrun a.py --x)", "sub/a.py", ["--x"]),
        ("cd /opt/code && torchrun a.py --x", "/opt/code/a.py", ["--x"]),
        ("cd $SLURM_SUBMIT_DIR; torchrun a.py --x", "a.py", ["--x"]),
        ("for node in a b; do srun -w $node torchrun --node_rank=$node a.py --x & done; wait", "a.py", ["--x"]),
        ("X=1; export X; bash -c 'torchrun a.py $X'", "a.py", ["1"]),
        ("X=1; X+=2; torchrun a.py $X ${X}3", "a.py", ["12", "123"]),
        ("set -- a 'b c'; torchrun a.py \"$@\" $#", "a.py", ["a", "b c", "2"]),
        ("f() { torchrun a.py \"$@\"; }; f x 'y z'", "a.py", ["x", "y z"]),
        ('A=(1 2); torchrun a.py ${A[1]} ${#A[@]} "${A[*]}"', "a.py", ["2", "2", "1 2"]),
        ("if true; then X=1; else X=1; fi; torchrun a.py $X", "a.py", ["1"]),
    ],
)
def test_a_launch_command_is_read(text: str, script: str, arguments: list[str]) -> None:
    runner = get_runner(f"#!/bin/bash\n{text}\n")
    assert (runner["script"], runner["script_args"]) == (script, arguments)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("srun python a.py\nsrun python b.py", ["(line 2)", "(line 3)", "srun python a.py", "--launch 2"]),
        ("python a.py\npython b.py", ["(line 2)", "(line 3)", "--launch"]),
        ("if [ $X ]; then\ntorchrun a.py\nelse\ntorchrun b.py\nfi", ["(line 3)", "(line 5)"]),
        ("srun ./wrapper.sh train.py", ["another script: import that script"]),
        ("srun ./wrapper.sh train.py\npython a.py", ["(line 2)", "wrapper.sh"]),
        ('srun bash -c "$CMD"', ["$CMD is unresolved", "--set CMD=VALUE"]),
        ("$RUN torchrun a.py", ["$RUN is unresolved", "--set RUN=VALUE"]),
        ('eval "$CMD"', ["eval runs text that is unresolved", "--set CMD=VALUE"]),
        ("bash run.sh", ["runs another script"]),
        ("docker run --gpus all image torchrun a.py", ["docker starts commands elsewhere"]),
        ("ssh gpu-1 torchrun a.py\ntorchrun b.py", ["(line 2)", "(line 3)"]),
        ("srun bash <<END\ntorchrun a.py\nEND", ["reads its commands from its input"]),
        ("python prepare.py\nbash run_training.sh", ["(line 2)", "(line 3)"]),
        ("python prepare.py\nllamafactory-cli train a.yml", ["(line 3)", "the program llamafactory-cli is not supported"]),
        ("python prepare.py\nssh gpu-1 'cd x && torchrun a.py'", ["(line 3)"]),
        ("python prepare.py\ntmux new-session -d 'torchrun a.py'", ["(line 3)"]),
        ("source settings.sh\ntorchrun a.py ${LR:-3}", ["may be set by what line 2 reads"]),
        ("cd $(dirname $0)\ntorchrun a.py", ["is the folder of the script", "--set 0=VALUE"]),
        ("for i in $(seq 3); do\nexport SEED=$i\ntorchrun a.py\ndone", ["the loop over i starts several runs"]),
        ("#SBATCH hetjob\nsrun torchrun a.py", ["jobs with several components are not supported"]),
        ("torchrun a.py $X\\\nY", ["a line continues in the name of a variable"]),
        ("srun my_launcher train.py", ["the program my_launcher is not supported"]),
        ("srun --unknown x torchrun a.py", ["the option --unknown of srun is unknown"]),
        ("srun --nodes$N=1 torchrun a.py", ["the option --nodes$N=1 of srun is unresolved", "--set N=VALUE"]),
        ("torchrun --unknown x a.py", ["the flag --unknown of torchrun is unknown"]),
        ("torchrun --no-python a.out", ["not a Python script"]),
        ("mpirun -np 1 python a.py : -np 1 python b.py", ["several programs"]),
        ("for lr in 1 2; do\ntorchrun a.py --lr $lr\ndone", ["$lr takes several values in a loop", "--set lr=VALUE"]),
        ("for seed in 1 2; do\nSEED=$seed torchrun a.py\ndone", ["the loop over seed starts several runs"]),
        ("exit 0\ntorchrun a.py", ["the script ends before it"]),
        ("train() { torchrun a.py; }", ["the function train is never called"]),
        (
            "torchrun a.py <DATA_DIR> --x <your name>",
            ["<DATA_DIR> is a placeholder", "<your name> is a placeholder", "--set DATA_DIR=VALUE"],
        ),
        ('torchrun a.py --x $X "$1" ${HOME}/d', ["$X is not set", "--set X=VALUE --set 1=VALUE --set HOME=VALUE"]),
        ("torchrun a.py --x $(date)", ["$(date) is the output of a command"]),
        ("D=$(date)\ntorchrun a.py --x $D", ["$D is the output of a command", "--set D=VALUE"]),
        ("torchrun a.py *.txt", ["is a glob pattern"]),
        ("torchrun a.py {1,2}", ["expands to several words"]),
        ("torchrun $SCRIPT", ["$SCRIPT is not set", "--set SCRIPT=VALUE"]),
        ("python -m $MODULE", ["$MODULE is not set"]),
        ("cd $WORK\ntorchrun a.py", ["$WORK is not set"]),
        ("srun apptainer exec $IMAGE torchrun a.py", ["$IMAGE is not set"]),
        ("[ $M ] && X=1\ntorchrun a.py $X", ["$X depends on the condition in line 2", "--set X=VALUE"]),
        ("torchrun a.py ${X:?}", ["${X:?} is not set"]),
        ("torchrun a.py 'open", ["cannot be parsed: a single quote is not closed"]),
        ("if true; then torchrun a.py", ["cannot be parsed"]),
        ("torchrun a.py ${X@Q!}", ["line 2"]),
        ("declare -n R=X\ntorchrun a.py", ["declare -n is not supported"]),
        ("typeset -i N=1\nN=N+1\ntorchrun a.py $N", ["typeset -i is not supported"]),
        ("IFS=,\ntorchrun a.py $PWD", ["IFS"]),
    ],
)
def test_an_uncertain_script_is_refused(text: str, parts: list[str]) -> None:
    message = refuse(f"#!/bin/bash\n{text}\n")
    assert [part for part in parts if part not in message] == [], message
    assert "hint: " in message


@pytest.mark.parametrize(
    "text",
    [
        "set -- $EMPTY x y; torchrun t.py $#",
        'set -- "$EMPTY" x; f() { torchrun t.py "$2"; }; f $1 "$@"',
        "set x 'y z'; torchrun t.py \"$@\"",
        "set -e -o pipefail x; torchrun t.py $1 $#",
        "set -euo pipefail; set a b; torchrun t.py $2",
        "set -- a b; shift 3; torchrun t.py $#",
        "set -- a b c; shift 2; torchrun t.py $1",
        "LR=1; f() { torchrun t.py --lr $LR; }; LR=2 f",
        "f() { torchrun t.py --lr $LR; }; LR=1; LR=2 f; true",
        "LR=1; LR=2 eval 'torchrun t.py --lr $LR'",
        "LR=1; f() { LR=3; }; LR=2 f; torchrun t.py --lr $LR",
        "f() { bash -c 'torchrun t.py --lr $LR'; }; LR=2 f",
        "V=12abc; torchrun t.py ${V%%[^0-9]*} ${V##[!a-z]} ${V#[0-9]}",
        "N=3; torchrun t.py $((N - -2)) $((+N))",
        "f() { echo; }; if true; then g() { torchrun t.py $1; }; fi; f; g x",
        "main() { python t.py || return 1; exit 0; }; main; torchrun other.py",
        "f() { X=1; return; }; f; torchrun t.py $X",
        "f() { if true; then X=1; return 0; else X=1; fi; }; f; torchrun t.py $X",
        "f() { cd . || return 1; X=2; }; X=2; f; torchrun t.py $X",
        "! false && true; torchrun t.py x",
        "cd project; env -C src python t.py",
        "cd project; uv run --directory src torchrun t.py",
    ],
)
def test_a_script_starts_what_bash_starts(text: str, tmp_path: Path) -> None:
    script = f"#!/bin/bash\nEMPTY=\n{text}\n"
    started = next(argv for argv, _ in run_in_bash(script, tmp_path) if argv[0] in ("torchrun", "python"))
    runner = get_runner(script)
    assert [Path(runner["script"]).name, *runner.get("script_args", [])] == started[1:]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("A=($(cmd))\ntorchrun t.py ${#A[@]}", "${#A[@]} depends on the number of words in $A"),
        ('A=(a $X)\ntorchrun t.py "${A[@]:2}"', "depends on the number of words in $X"),
        ("set -- $OPTS x\ntorchrun t.py $2", "$2 depends on the number of words in $OPTS"),
        ("set -- $OPTS x\ntorchrun t.py $#", "$# depends on the number of words in $OPTS"),
        ("set -- $OPTS x\nshift\ntorchrun t.py $1", "is shifted by an unknown number of words"),
        ("if [ $D ]; then A=(1); else A=(1 2); fi\ntorchrun t.py ${#A[@]}", "${#A[@]} depends on the number of words in $A"),
        ("set -- a b\ntorchrun t.py ${@:0}", "is an unsupported expansion"),
        ("SEED=0\nfor ((SEED=1;SEED<=3;SEED++)); do\ntorchrun t.py $SEED\ndone", "$SEED takes several values in a loop"),
        ("SEED=0\nfor ((SEED=1;SEED<=3;SEED++)); do\ntrue\ndone\ntorchrun t.py $SEED", "$SEED depends on the condition in line 3"),
        ("N=1\nwhile ((N++<3)); do\ntorchrun t.py $N\ndone", "$N is computed"),
        ("N=1\nfor i in 1 2; do\ntorchrun t.py $N\nX=$((N++))\ndone", "$N changes in the loop of line 3"),
        ("N=1\ntorchrun t.py $((++N))", "$((++N)) changes a variable"),
        ("N=1\nX=$((N++))\ntorchrun t.py $N", "$N is computed in line 3"),
        ("N=1\nX=$((N+=1))\ntorchrun t.py $N", "$N is computed in line 3"),
        ("N=1\ntorchrun t.py $[N+1]", "$[…] is not supported"),
        ("A=(1 2)\n((A[0]++))\ntorchrun t.py $A", "$A is computed"),
        ("if [ $D ]; then\ntorchrun debug.py\nelse\npython t.py\nfi", "--launch 3"),
        ("[ $D ] && torchrun debug.py || python t.py", "may start training: python t.py"),
        ("case $D in\n1) torchrun debug.py;;\n*) python t.py;;\nesac", "--launch 3"),
        ("if [ $D ]; then\ntorchrun debug.py\nexit\nfi\npython t.py", "--launch 3"),
        ("f() {\nif [ $D ]; then\ntorchrun debug.py\nexit\nfi\n}\nf\npython t.py", "--launch 4"),
        ("f() {\nif [ $D ]; then return; fi\npython t.py\nexit\n}\nf\ntorchrun other.py", "--launch 8"),
        ("if [ $D ]; then\nf() { torchrun a.py; }\nelse\nf() { torchrun b.py; }\nfi\nf", "--launch 3"),
        ("[ -f env.sh ] && source env.sh\ntorchrun t.py ${LR:-0.1}", "may be set by what line 2 reads"),
        ("LR=1\nsource cfg.sh\ntorchrun t.py $LR", "$LR may be set by what line 3 reads"),
        ("LR=1\n. ./cfg.sh\ntorchrun t.py ${LR:-2}", "may be set by what line 3 reads"),
        ("LR=1\neval $(parse_yaml c.yml)\ntorchrun t.py $LR", "$LR may be set by what line 3 reads"),
        ("LR=1\n. ./cfg.sh\ntorchrun t.py $((LR+1))", "$((LR+1))"),
        ("export LR=1\nsource $HOME/cfg.sh\nbash -c 'torchrun t.py $LR'", "may be set by what line 3 reads"),
        ("D=/data\n! cd X && D=/fallback\ntorchrun t.py $D", "$D depends on the condition in line 3"),
        ("f() {\nif [ $D ]; then\nX=1\nreturn\nfi\nX=2\n}\nf\ntorchrun t.py $X", "$X depends on the condition"),
        ('V=a*b\ntorchrun t.py ${V%"*"*}', "is an unsupported expansion"),
        ("V=12ab\ntorchrun t.py ${V%%[[:alpha:]]*}", "is an unsupported expansion"),
        ("python prepare.py\nzsh -c 'torchrun t.py $X'", "zsh is not a supported shell"),
        ("env -C $WORK torchrun t.py", "$WORK is not set"),
    ],
)
def test_a_value_that_depends_on_the_job_is_not_imported(text: str, part: str) -> None:
    message = refuse(f"#!/bin/bash\n{text}\n")
    assert part in message, message


@pytest.mark.parametrize(
    ("text", "nodes", "ranks"),
    [
        ("N=($(scontrol show hostnames))\ntorchrun --nnodes=${#N[@]} t.py", None, None),
        ("GPUS=($(nvidia-smi -L))\ntorchrun --nproc_per_node ${#GPUS[@]} t.py", None, None),
        ('A=("$X" b)\ntorchrun --nproc_per_node ${#A[@]} t.py', None, 2),
        ("#SBATCH --gres=gpu:4\npython t.py", None, 1),
        ("#SBATCH --nodes=4 --ntasks-per-node=4\npython t.py", None, 1),
        ("#SBATCH --nodes=4 --ntasks-per-node=4\nsrun python t.py", 4, 4),
    ],
)
def test_counts_are_those_of_the_job(text: str, nodes: int | None, ranks: int | None) -> None:
    result = import_script(f"#!/bin/bash\n{text}\n").result
    runner = result.values["runner"]
    assert (runner.get("nodes"), runner.get("default_gpu_count")) == (nodes, ranks)
    is_one_process = [row for row in result.unmapped_keys if row.replacement == "one process without srun: runner.default_gpu_count is 1"]
    assert bool(is_one_process) == ("\npython" in text)


@pytest.mark.parametrize(
    "line",
    [
        "source /opt/venv/bin/activate",
        ". ~/.bashrc",
        "source $ROOT/etc/profile.d/conda.sh",
        ". /etc/profile",
        'eval "$(conda shell.bash hook)"',
        "! mkdir out && exit 1",
    ],
)
def test_lines_that_prepare_the_environment_do_not_change_variables(line: str) -> None:
    assert get_runner(f"#!/bin/bash\nLR=1\n{line}\ntorchrun t.py $LR\n")["script_args"] == ["1"]


def test_folders_of_prefixes_are_those_of_the_script() -> None:
    for prefix in (
        "env -C src",
        "uv run --directory src",
        "srun --chdir=src",
        "mpirun -wdir src",
        "conda run --cwd src",
        "uv --directory src run",
    ):
        assert get_runner(f"#!/bin/bash\n{prefix} python t.py\n")["script"] == "src/t.py"
    nested = "srun --chdir=/src env -C sub bash -c 'cd inner; torchrun t.py'"
    assert get_runner(f"#!/bin/bash\n{nested}\n")["script"] == "/src/sub/inner/t.py"


def test_a_switch_that_only_another_service_has_is_reported() -> None:
    text = "services: {a: {command: torchrun t.py}, b: {command: torchrun --standalone t.py}}"
    rows = importers.import_config_text(text, "c.yml").result.unmapped_keys
    assert [row.key for row in rows if "standalone" in row.key] == ["services.b.command.torchrun --standalone"]


@pytest.mark.parametrize("line", ["#!/bin/tcsh", "#!/usr/bin/env fish", "#!/usr/bin/env python3", "#!/bin/zsh -l"])
def test_other_shells_are_refused(line: str) -> None:
    assert "is not a supported shell" in refuse(f"{line}\ntorchrun a.py\n")


@pytest.mark.parametrize("line", ["#!/bin/bash -l", "#! /bin/sh", "#!/usr/bin/env bash", "#!/bin/dash"])
def test_shells_with_the_syntax_of_sh_are_read(line: str) -> None:
    assert get_runner(f"{line}\ntorchrun a.py\n")["script"] == "a.py"


def test_one_of_several_launch_commands_is_selected_by_its_line() -> None:
    text = "#!/bin/bash\nsrun python a.py\nsrun python b.py --x\n"
    assert get_runner(text, line=3)["script"] == "b.py"
    assert "lines with commands that may start training: 2, 3" in refuse(text, line=1)
    assert "does not start training" in refuse("#!/bin/bash\necho\ntorchrun a.py\n", line=2)


def test_set_gives_values_to_variables_and_arguments() -> None:
    text = '#!/bin/bash\nX=$(date)\nfor lr in 1 2; do torchrun a.py --x $X $1 --lr $lr "<Y>" <Y>; done\n'
    runner = get_runner(text, settings=["X=a b", "1=c", "lr=3", "Y=d"])
    assert runner["script_args"] == ["--x", "a", "b", "c", "--lr", "3", "<Y>", "d"]
    assert "'X' is not in the form NAME=value" in refuse(text, settings=["X"])
    with pytest.raises(SwarmtrainError, match="not a script"):
        importers.import_config_text("services: {a: {command: torchrun a.py}}", "c.yml", settings=importers.ScriptSettings({"A": "1"}))


def test_secrets_are_neither_copied_nor_printed() -> None:
    secrets = ("hf_thisisnotreal", "sk-thisisnotreal", "0123456789abcdef0123456789abcdef01234567", "pass-word-1", "alsonotreal")
    text = f"""#!/bin/bash
wandb login {secrets[2]}
huggingface-cli login --token {secrets[0]}
export WANDB_API_KEY={secrets[2]} OTHER={secrets[1]}
MY_SECRET={secrets[4]}
curl -H "Authorization: Bearer {secrets[4]}" https://user:{secrets[3]}@example.org
docker login -u me -p {secrets[3]}
torchrun a.py --hf-token {secrets[0]} --hf_token={secrets[0]} --wandb_api_key {secrets[2]} --password {secrets[3]} --x $MY_SECRET \\
  --key {secrets[1]} model.api_key={secrets[4]} {secrets[0]} --keep text
"""
    imported = import_script(text)
    assert imported.result.values["runner"]["script_args"] == ["--keep", "text"]
    printed = imported.to_yaml() + imported.format_report() + json.dumps(imported.to_dict())
    printed += refuse(text + f"torchrun b.py --token {secrets[3]}\n") + refuse(
        text.replace("--keep text", "$UNKNOWN"), settings=[f"K={secrets[0]}"]
    )
    assert [secret for secret in secrets if secret in printed] == []
    assert "use runner.secrets" in imported.format_report()


def test_variables_of_containers_and_launchers_are_all_kept() -> None:
    text = "srun --export=ALL,A=1 apptainer exec --env B=2 --env C=3,D=4 --env=E=5 image.sif torchrun a.py\n"
    runner = get_runner(f"#!/bin/bash\n{text}")
    assert runner["env"] == {"A": "1"}
    assert runner["slurm"]["apptainer"]["env"] == {"B": "2", "C": "3", "D": "4", "E": "5"}
    assert get_runner("#!/bin/bash\nmpirun -x A=1 -x B=2 python a.py\n")["env"] == {"A": "1", "B": "2"}


def test_options_of_pyxis_become_those_of_apptainer() -> None:
    text = """#!/bin/bash
#SBATCH --container-image nvcr.io#nvidia/pytorch:24.10
#SBATCH --container-mounts=/a:/b:ro,/c:/d
srun torchrun a.py
"""
    apptainer = get_runner(text)["slurm"]["apptainer"]
    assert apptainer == {"image": "docker://nvcr.io/nvidia/pytorch:24.10", "binds": ["/a:/b:ro", "/c:/d"]}
    result = import_script("#!/bin/bash\nsrun --container-image=/images/a.sqsh torchrun a.py\n").result
    assert result.values["runner"]["slurm"]["apptainer"]["image"] == "/images/a.sqsh"


def test_lines_that_depend_on_the_environment_become_the_prelude() -> None:
    text = "X=/x\nexport PATH=$X/bin:$PATH\nmodule load a\nexport B=$HOME/b\nif [ $C ]; then module load c; fi\n"
    slurm = get_runner(f"#!/bin/bash\n{text}srun torchrun a.py\nmodule unload a\n")["slurm"]
    assert slurm["prelude"] == ["export PATH=/x/bin:$PATH", "module load a", "export B=$HOME/b"]
    local = import_script(f"#!/bin/bash\n{text}torchrun a.py\n")
    assert "set runner.env.PATH" in local.format_report()
    assert "env" not in local.result.values["runner"]


def test_srun_requests_the_resources_without_sbatch() -> None:
    runner = get_runner("#!/bin/bash\nsrun -p big --gres=gpu:8 --nodes=4 --ntasks-per-node=8 -A me python train.py\n")
    assert runner["slurm"] == {"account": "me", "partition": "big", "gres": "gpu:8"}
    assert (runner["nodes"], runner["default_gpu_count"]) == (4, 8)


def test_gpus_per_task_times_tasks_are_the_gpus_of_a_node() -> None:
    runner = get_runner("#!/bin/bash\n#SBATCH --tasks-per-node=2 --gpus-per-task=4\nsrun torchrun --nproc_per_node=gpu train.py\n")
    assert (runner["default_gpu_count"], runner["slurm"]) == (8, {"gpus_per_node": 8})


def test_options_without_a_value_are_reported() -> None:
    """A template whose options are to be filled in."""
    options = "#SBATCH --partition= # set it\n#SBATCH -A # set it\n#SBATCH --cpus-per-gpu=\n#SBATCH --hold\n"
    result = import_script(f"#!/bin/bash\n{options}srun torchrun train.py\n").result
    assert result.values["runner"]["slurm"] == {"options": ["--hold"]}
    assert [(row.key, row.replacement) for row in result.unmapped_keys][:3] == [
        ("#SBATCH --partition", "has no value in the script"),
        ("#SBATCH --account", "has no value in the script"),
        ("#SBATCH --cpus-per-gpu", "has no value in the script"),
    ]


def test_options_below_the_first_command_are_ignored() -> None:
    imported = import_script("#!/bin/bash\n#SBATCH --nodes=2\necho\n#SBATCH --nodes=3\nsrun torchrun a.py\n")
    assert imported.result.values["runner"]["nodes"] == 2
    assert "sbatch ignores options below the first command" in imported.format_report()


FRAGMENTS = (
    *("a", "b c", '"', "'", "\\", "$X", "${X}", '"$X"', "'$X'", "${Y:-d e}", '"${Y:-d e}"', "${Z-q}", "${E:-f}", "${E-f}", "${X:+g h}"),
    *("${E:+i}", "${A[@]}", '"${A[@]}"', '"${A[*]}"', "${A[1]}", "${#A[@]}", "${#X}", "$((1+2))", "$(( N * 3 ))", "${P%.*}", "${P##*/}"),
    *("${P/a/b}", "${P//a/}", '"x${A[@]}y"', "$@", '"$@"', "#", "a#", "=", "--o=", "\\ ", '\\"', "$'t\\tn'", "~", "~/x", "{a", "}", "^"),
    *("${X:0:1}", "${A[@]:1}", "${A[@]:1:1}", "${P^^}", "%", "!", "-", "\\\n", '${X+"$X"}', '${E:-"p  q"}', "$N$N", '""', "''", "$#"),
    *('${A[@]+"${A[@]}"}', '${B[@]+"${B[@]}"}', '"${B[@]}"', "`a`", "$(a)", "*", "?", "{1,2}", "$U", ";", "$((", "${"),
)
VARIABLES = "X='l m'\nE=\nN=4\nP=/da/ta.tar.gz\nA=(1 '2 3' four)\nB=()\n"


def test_words_are_expanded_as_in_bash(tmp_path: Path) -> None:
    """Random words: the arguments of a command are those that bash passes, unless the import is refused."""
    generator = random.Random(7)  # noqa: S311  # not a secret
    words = [
        " ".join("".join(generator.choices(FRAGMENTS, k=generator.randint(1, 4))) for _ in range(generator.randint(1, 3)))
        for _ in range(1500)
    ]
    words = [text for text in words if not text.endswith("\\")]  # which would join the next line
    shown = 'show() { printf "%s\\0" "$@"; }\n'
    cases = "".join(f"eval {shlex.quote(f'show a.py {text}')} 2>/dev/null </dev/null; printf '\\1\\0'\n" for text in words)
    command = ["bash", "-c", f"{shown}{VARIABLES}{cases}"]
    environment = {"PATH": "/nowhere", "HOME": "/home/me"}
    output = subprocess.run([shutil.which("bash") or "bash", *command[1:]], cwd=tmp_path, env=environment, capture_output=True, check=False)
    results = output.stdout.decode().split("\1\0")[:-1]
    assert len(results) == len(words)
    compared = 0
    for text, result in zip(words, results, strict=True):
        with contextlib.suppress(SwarmtrainError):
            runner = get_runner(f"#!/bin/bash\n{VARIABLES}python a.py {text}\n", settings=["HOME=/home/me"])
            compared += 1
            assert result.split("\0")[:-1] == ["a.py", *runner.get("script_args", [])], text
    assert compared > 300


STATEMENTS = (
    "LR=2",
    "LR=$((LR+1))",
    "LR=3 f",
    "f() { LR=4; }",
    "f() { local LR=5; g; }",
    "g() { X=$LR; }",
    "g",
    "f",
    "set -- a b",
    "set x y z",
    "shift",
    "shift 2",
    "X=$1",
    "X=$#",
    "X=${#A[@]}",
    "A=(1 2 3)",
    "A+=(4)",
    "A=(${A[@]:1})",
    'set -- "${A[@]}"',
    '[ -n "$D" ] && LR=7',
    '[ -n "$D" ] || LR=8',
    "! true && LR=9",
    "! false && LR=10",
    "true && LR=11",
    'if [ -n "$D" ]; then LR=12; fi',
    'if [ -n "$D" ]; then LR=13; else LR=14; fi',
    'if [ -n "$D" ]; then f() { LR=15; }; fi',
    "unset LR",
    "unset -f f",
    "LR=${LR:-16}",
    ": ${LR:=17}",
    "X=${LR%1}",
    "X=${LR#1}",
    "(LR=18)",
    "{ LR=19; }",
    "for i in 1 2; do LR=$i; done",
    "for ((i=0;i<3;i++)); do LR=$i; done",
    "while ((N++<2)); do LR=20; done",
    "((N++))",
    "let N=5",
    "X=$((N*2))",
    "eval 'LR=21'",
    "LR=22 eval 'X=$LR'",
    "case $D in 1) LR=23;; *) LR=24;; esac",
    'h() { if [ -n "$D" ]; then return; fi; LR=25; }; h',
    'h() { [ -n "$D" ] || return 1; LR=26; }; h',
    "k() { return 0; LR=27; }; k",
    "read -r LR <<< 28",
    "printf -v LR 29",
    'X="$*"',
    "X=$@",
    "set -- ${X}",
    "LR+=1",
    "export LR",
    "X=${@:2}",
    "X=${A[0]}",
    "X=${A[-1]}",
    "N=1",
    "unset A",
    "declare LR=30",
    "LR=31 X=$LR",
    "until true; do LR=32; done",
    "m() { shift; X=$1; }; m a b",
    "m() { set -- q; X=$1; }; m; X=$X$1",
    '[ -n "$D" ] && { LR=33; } || LR=34',
    "true || LR=35",
    "false || LR=36",
    "if true; then X=37; fi",
    "echo a | read X",
    "echo a | { LR=38; }",
    "X=$(LR=39)",
    "LR= ",
    "X=${LR:+40}",
    "X=${LR-41}",
    "Y=LR; X=${!Y}",
    "LR=42; f; g",
    "set -- $X $LR",
    "LR=$((N++)) f",
    'n() { for i in a b; do [ -n "$D" ] && return; LR=43; done; }; n',
    "(exit 1) || LR=44",
    "(exit 1); LR=45",
    "case x in x) LR=46;& y) LR=47;; esac",
    "case $LR in 1) X=48;;& *) X=49;; esac",
    "while true; do LR=50; break; done",
    "set -a; Y=51; set +a; X=$Y",
    'o() { eval "$1=52"; }; o LR',
    "p() { local X=53; q; }; q() { LR=$X; }; p",
    "local_test() { local LR; LR=54; }; local_test",
    "r() { LR=55; unset LR; }; r",
    "A[1]=56; X=${A[1]}",
    "X=${#LR}",
    "X=${*:1:1}",
    "X=${LR:0:1}",
    "f 57; X=$1",
    's() { X=$#; }; s $LR "$@"',
    "if f; then X=58; fi",
    "if ! f; then X=59; fi",
    "f && X=60",
    "f || X=61",
    't() { [ -n "$D" ]; }; t && LR=62',
    "t() { LR=63; false; }; t || X=64",
    "u() { f() { LR=65; }; }; u; f",
    "{ LR=66; exit_later=1; } || true",
    "[ $N -gt 0 ] && LR=67",
    "LR=68 && X=69 || X=70",
    "LR=$X X=71",
    "X=$X$LR",
    'A=("${A[@]}" "$LR"); X=${#A[@]}',
    "for LR; do :; done",
    'for v in "$@"; do LR=$v; shift; done',
    "while [ $# -gt 1 ]; do shift; done",
    "IFS=, read -r X LR <<< 72,73",
    "mapfile -t A < /dev/null; X=${#A[@]}",
    "export LR=74; X=$(bash -c 'echo $LR')",
    "w() { return 1; }; w; X=$?",
    "exec 3>&1",
    "trap 'LR=75' EXIT",
    "coproc true",
    "let LR+=1",
    "((LR=76, N=2))",
    "X=$((LR==1?2:3))",
    "X=$((1<<2))",
    "X=$((LR>0))",
    "typeset -i LR=77",
    "readonly Z=78; X=$Z",
    "X=a\\\nb",
    "X='a'\"b\"",
    "alias ll='LR=79'",
    "[[ $D == 1 ]] && LR=80",
    'test -n "$D" && LR=81',
    '[ -n "$D" ] && exit 0',
    'if [ -n "$D" ]; then torchrun t.py; exit; fi',
    'x() { exit 0; }; [ -n "$D" ] && x',
    'y() { if [ -n "$D" ]; then LR=82; return 2; fi; LR=83; }; y',
    "declare -g LR=84",
    "z() { declare LR=85; X=$LR; }; z",
    "z() { declare -g LR=86; }; z",
)
INITIAL_STATEMENTS = "LR=1; N=0; A=(7); X=0; set -- p q\n"


@pytest.mark.parametrize("debug", ["", "1"])
def test_statements_are_evaluated_as_in_bash(debug: str, tmp_path: Path) -> None:
    """Random statements: variables have the values of bash, whatever the environment contains, unless the import is refused."""
    generator = random.Random(11)  # noqa: S311  # not a secret
    texts = ["\n".join(generator.choices(STATEMENTS, k=generator.randint(1, 5))) for _ in range(400)]
    scripts = [f'{INITIAL_STATEMENTS}{text}\ntorchrun t.py "[$LR]" "[$X]" "[$1]" $#\n' for text in texts]
    imported: dict[str, list[str]] = {}
    for script in scripts:
        with contextlib.suppress(SwarmtrainError):
            imported[script] = get_runner(f"#!/bin/bash\n{script}", settings=[])["script_args"]
    stub = 'torchrun() { printf "%s\\0" "$@"; }\n'
    cases = "".join(f"bash -c {shlex.quote(stub + script)} 2>/dev/null </dev/null; printf '\\1\\0'\n" for script in imported)
    (tmp_path / "cases.sh").write_text(cases)
    command = [shutil.which("bash") or "bash", "cases.sh"]
    output = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "D": debug}, capture_output=True, check=False).stdout
    results = output.decode().split("\1\0")[:-1]
    assert len(results) == len(imported) > 400 // 8
    for script, result in zip(imported, results, strict=True):
        if result:  # the script may end before
            assert result.split("\0")[:-1] == ["t.py", *imported[script]], script
