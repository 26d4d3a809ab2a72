"""Launchers of other packages: the package of the how-to page is used through the command line, and broken ones are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_package import install_toy_package, write_metadata

ROOT = Path(__file__).parents[2]
CONFIG = "runner: {runner_type: toy}\n"


class Project:
    """A folder with a config, and a folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packages = folder / "project", folder / "packages"
        self.folder.mkdir()
        (self.folder / "training_code.py").write_text("pass\n")
        (self.folder / "toy.yml").write_text(CONFIG)
        self._environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.packages}",
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "DOCKER_HOST": f"unix://{folder}/no.sock",
        }

    def run_swarmtrain(self, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swarmtrain", *argv],
            cwd=self.folder,
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def read_output(self, *argv: str, **environ: str) -> str:
        """Return the output of a command that must succeed."""
        done = self.run_swarmtrain(*argv, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def install_broken_launcher(self) -> None:
        """Install a package whose launcher cannot be imported."""
        write_metadata(self.packages, "swarmtrain-broken", "2.0", {"swarmtrain.launchers": {"broken": "broken_launcher:Launcher"}})
        (self.packages / "broken_launcher.py").write_text("import a_missing_module\n")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_launcher_of_another_package_runs_the_commands(project: Project) -> None:
    install_toy_package(project.packages)
    assert "run toy by toy on the folder toy-runs" in project.read_output("plan", "toy.yml")
    project.read_output("deploy", "toy.yml", "--detach")
    assert "a deploy would change nothing" in project.read_output("plan", "toy.yml")
    assert "toy0" in project.read_output("status")
    completion = {"_SWARMTRAIN_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert project.read_output(**completion, COMP_WORDS="swarmtrain\nstatus\nt").split() == ["toy"]
    project.read_output("generate", "toy.yml", "--output", "toy.json")
    assert '"runner_type": "toy"' in (project.folder / "toy.json").read_text()
    assert "toy removed" in project.read_output("down", "toy")
    assert project.run_swarmtrain("status", "toy").returncode == 1


def test_an_unknown_runner_type_is_refused_with_all_that_exist(project: Project) -> None:
    install_toy_package(project.packages)
    error = project.run_swarmtrain("plan", "toy.yml", "-o", "runner.runner_type=other").stderr
    assert "must be 'swarm', 'docker', 'local', 'ssh', 'ssh_docker', 'slurm' or 'toy', not \"other\"" in error


def test_a_broken_launcher_is_an_error_that_names_its_package(project: Project) -> None:
    project.install_broken_launcher()
    done = project.run_swarmtrain("plan", "toy.yml", "-o", "runner.runner_type=broken")
    assert done.returncode == 1
    assert "broken (broken_launcher:Launcher of package swarmtrain-broken 2.0): cannot be imported: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_class_that_is_not_a_launcher_is_refused(project: Project) -> None:
    write_metadata(project.packages, "wrong", "1", {"swarmtrain.launchers": {"wrong": "wrong:Launcher", "partial": "wrong:Partial"}})
    (project.packages / "wrong.py").write_text(
        "from swarmtrain.config.schema.runner_types import Capabilities\n"
        "class Launcher: pass\nclass Partial:\n    capabilities = Capabilities()\n    def list_runs(self): return []\n"
    )
    assert (
        "its attribute capabilities is not an instance of Capabilities"
        in project.run_swarmtrain("plan", "toy.yml", "-o", "runner.runner_type=wrong").stderr
    )
    assert (
        "launcher partial: does not implement build_node_command, check_plan, deploy"
        in project.run_swarmtrain("plan", "toy.yml", "-o", "runner.runner_type=partial").stderr
    )


def test_a_broken_launcher_does_not_break_the_status_of_others(project: Project) -> None:
    install_toy_package(project.packages)
    project.install_broken_launcher()
    project.read_output("deploy", "toy.yml", "--detach")
    assert "toy0" in project.read_output("status", "toy")
    assert "toy" in project.read_output("history")


def test_nodes_need_no_launcher_package() -> None:
    from swarmtrain.config import Config

    text = Config().to_json().replace('"runner_type": "swarm"', '"runner_type": "elsewhere"')
    assert Config.from_json(text).runner.runner_type == "elsewhere"
