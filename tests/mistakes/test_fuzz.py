"""Hundreds of invalid configs and overrides reach every renderer: an error of ours, or an output that Docker, bash and exec take.

Never a traceback. tests/randomized.py says how to try others.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from invalid_inputs import HOSTILE_STRINGS, OVERRIDES, check_error_format, config_texts, permissive_configs
from randomized import count_examples, run_examples

from swarmtrain.cargo import read_cargo
from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.local import LocalLauncher
from swarmtrain.launchers.planner import derive_run_name
from swarmtrain.launchers.ssh.process_specs import HostContext, build_process_specs
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.planning.inventory import Inventory, Machine, build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.render import compose_file
from swarmtrain.render.sbatch_script import JobLayout, render_sbatch_script
from swarmtrain.render.stack_document import Stack, render_stack, render_stack_yaml

EXAMPLES = count_examples(fixed=420, seeded=3000)
MAX_SECONDS = 2.0  # seconds for one config, on a machine that has other things to do
DOCKER_SAMPLES = 20
MIN_RENDERINGS = 20
"""Of 500 renderings, so many at least are one launcher's."""
RUNNERS = st.sampled_from([None, None, None, *BUILT_IN_LAUNCHERS])
"""None: the runner_type that the config has."""


class ConfigFuzzer:
    """Passes configs to the renderers, and counts what comes out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()
        self.stacks: dict[str, Stack] = {}
        self.scripts: list[str] = []
        for name in ("training_code.py", "datautils.py", "key"):
            (folder / name).write_text(f"# {name}\n")

    def try_config(self, text: bytes, overrides: list[str], name: str | None, first_runner: str | None) -> None:
        """Render a config for the `first` launcher, and for every other one if that went well."""
        (self.folder / "config.yml").write_bytes(text)
        if self.try_runner(overrides, name, first_runner):
            for kind in BUILT_IN_LAUNCHERS:
                self.try_runner(overrides, name, kind)

    def try_runner(self, overrides: list[str], name: str | None, kind: str | None) -> bool:
        """Return whether the config is accepted; None is the launcher that it names itself."""
        started = time.process_time()
        try:
            plan = self.build_plan(
                self.folder / "config.yml", overrides if kind is None else [*overrides, f"runner.runner_type={kind}"], name
            )
            self.render_plan(plan)
        except SwarmtrainError as error:
            self.outcomes[type(error).__name__] += 1
            check_error_format(error)
            return False
        finally:
            assert time.process_time() - started < MAX_SECONDS
        self.outcomes[plan.config.runner.runner_type] += 1
        assert Config.from_json(plan.config.to_json()) == plan.config
        return True

    def build_plan(self, path: Path, overrides: list[str], name: str | None) -> Plan:
        config = load_config(path, overrides)
        cluster = Inventory("the swarm", tuple(Machine(f"node{index}", resources={"NVIDIA-GPU": 2}) for index in range(5)))
        cargo = read_cargo(config, self.folder)
        hosts = config.runner.host_entries
        return build_plan(
            config, build_offline_inventory(hosts) if hosts else cluster, cargo, run=derive_run_name(path) if name is None else name
        )

    def render_plan(self, plan: Plan) -> None:
        """Render a plan as its launcher does."""
        kind = plan.config.runner.runner_type
        if kind == "slurm":
            self.record_script(
                plan, render_sbatch_script(plan, JobLayout(PurePath("/home/me/run"), "/home/me/it's $HOME", "/usr/bin/python3"))
            )
        elif kind in ("ssh", "ssh_docker"):
            check_specs(plan, [spec for each in build_process_specs(plan, *build_hosts(plan)).values() for spec in each])
        elif kind == "local":
            LocalLauncher().plan_changes(plan)
        else:
            stack_document = render_stack(plan) if kind == "swarm" else compose_file.render_compose(plan)
            self.record_stack(stack_document, render_stack_yaml(stack_document), swarm=kind == "swarm")

    def record_stack(self, stack_document: Stack, written: str, *, swarm: bool) -> None:
        assert unescape_dollars(yaml.safe_load(written)) == stack_document.document
        assert json.loads(json.dumps(stack_document.document)) == stack_document.document
        if swarm:
            self.stacks[written] = stack_document

    def record_script(self, plan: Plan, written: str) -> None:
        """Each option is one line. A prelude is the user's own shell, so bash reads scripts without one."""
        options = [line for line in written.splitlines() if line.startswith("#SBATCH ")]
        assert all(line.isprintable() for line in options)
        assert f"--job-name={plan.run}" in " ".join(options)
        if not plan.config.runner.slurm.prelude:
            self.scripts.append(written)


def build_hosts(plan: Plan) -> tuple[RunRecord, dict[str, HostContext]]:
    """Return what a launcher over SSH knows of the hosts of `plan`."""
    names = list(dict.fromkeys(node.host for node in plan.nodes))
    record = RunRecord(
        interpreters=dict.fromkeys(names, "/usr/bin/python3"),
        nodes={node.name: node.host for node in plan.nodes},
        address=names[0],
        coordinator_port=29401,
        cwd="/home/me",
        stop_grace=plan.config.runner.stop_grace,
    )
    folder = PurePosixPath("/home/me/run")
    return record, {name: HostContext(folder, folder, "/home/me", 2, "1000:1000") for name in names}


def check_specs(plan: Plan, processes: list[ProcessSpec]) -> None:
    """A process can be started: one board and a process for each node, and no NUL in what exec is given."""
    assert len(processes) == len(plan.nodes) + 1
    for process in processes:
        argvs = [process.argv, process.prepare_command, process.stop_command, process.cleanup_command]
        assert process.argv
        assert all(isinstance(word, str) and "\0" not in word for argv in argvs for word in argv)
        assert not any("\0" in f"{name}{value}" for name, value in process.env.items())
        assert ProcessSpec(**json.loads(json.dumps(asdict(process)))) == process


def unescape_dollars(value: Any) -> Any:
    """Return a document as Docker reads it: `$$` is a dollar."""
    if isinstance(value, str):
        assert "$" not in value.replace("$$", "")
        return value.replace("$$", "$")
    if isinstance(value, dict):
        return {key: unescape_dollars(item) for key, item in value.items()}
    return [unescape_dollars(item) for item in value] if isinstance(value, list) else value


def test_no_config_and_no_override_gives_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    feeding = ConfigFuzzer(tmp_path)
    names = st.one_of(st.none(), st.none(), st.text(max_size=60), st.sampled_from(HOSTILE_STRINGS))
    valid_names = st.one_of(st.none(), st.from_regex(r"[a-z0-9]([a-z0-9-]{0,44}[a-z0-9])?", fullmatch=True))
    overrides = st.lists(OVERRIDES, max_size=3)
    run_examples(feeding.try_config, config_texts(), overrides, names, RUNNERS, suite="fast", examples=EXAMPLES)
    run_examples(feeding.try_config, permissive_configs(), st.just([]), valid_names, RUNNERS, suite="fast", examples=EXAMPLES // 3)
    total = sum(feeding.outcomes.values())
    print(f"{total} configs: " + ", ".join(f"{count} {outcome}" for outcome, count in feeding.outcomes.items()))
    assert total >= min(500, EXAMPLES)
    assert all(feeding.outcomes[kind] >= MIN_RENDERINGS * total / 500 for kind in BUILT_IN_LAUNCHERS)
    assert len(feeding.stacks) >= DOCKER_SAMPLES
    check_with_docker(feeding.stacks, tmp_path)
    check_with_bash(feeding.scripts)


def check_with_bash(scripts: list[str]) -> None:
    assert scripts
    for written in scripts[:: max(1, len(scripts) // 20)]:
        done = subprocess.run(["bash", "-n"], input=written, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), written


def check_with_docker(stacks: dict[str, Stack], folder: Path) -> None:
    """Let docker read some of the stack files, if there is one that can do so without an engine (23 and newer)."""
    every = max(1, len(stacks) // DOCKER_SAMPLES)
    for written in list(stacks)[::every]:
        path = folder / "stack.yml"
        path.write_text(written)
        for name, content in stacks[written].files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        try:
            done = subprocess.run(["docker", "stack", "config", "-c", str(path)], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return
        if "is not a docker command" in done.stderr or "unknown shorthand flag" in done.stderr:
            return
        assert done.returncode == 0, f"{done.stderr}\n{written}"
        assert done.stderr == "", done.stderr
    print("docker takes them")
