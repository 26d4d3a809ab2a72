"""The architecture is a test: imports go in one direction, and light commands load few modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_imports_go_one_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def list_loaded_modules(*argv: str, cwd: Path) -> set[str]:
    """Run `swarmtrain ARGV` in a new interpreter and return the names of all modules that it loaded."""
    program = f"""
import sys, json
sys.argv = {["swarmtrain", *argv]!r}
from swarmtrain.__main__ import run_program
try:
    assert run_program() == 0
finally:
    print("\\n" + json.dumps(sorted(sys.modules)))
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], {"torch", "docker", "numpy", "pydantic", "yaml", "requests", "swarmtrain.lab.lab"}),
        (["lab", "--help"], {"torch", "docker", "numpy", "yaml", "requests", "swarmtrain.config"}),
        (["generate", "config.yml"], {"torch", "docker", "numpy", "requests", "swarmtrain.queueing"}),
    ],
)
def test_light_commands_load_nothing_heavy(argv: list[str], heavy: set[str], tmp_path: Path) -> None:
    (tmp_path / "training_code.py").write_text("pass\n")
    (tmp_path / "config.yml").write_text("runner: {hosts: [a, b]}\n")
    assert list_loaded_modules(*argv, cwd=tmp_path) & heavy == set()


def test_the_entrypoint_needs_the_standard_library_alone() -> None:
    program = (
        "import sys, json, swarmtrain.entrypoint.supervisor.node_supervisor, "
        "swarmtrain.entrypoint.coordinator.server; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "pydantic", "yaml", "typer"} & set(json.loads(done.stdout))


def test_every_module_says_what_it_is() -> None:
    import ast

    silent = [str(path) for path in (ROOT / "swarmtrain").rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_field_of_the_config_is_read_somewhere() -> None:
    """A field that nothing reads would have no effect."""
    from pydantic import BaseModel

    from swarmtrain.config import Config
    from swarmtrain.config.schema.training_groups import TrainingGroupConfig

    def leaves(model: type[BaseModel]) -> set[str]:
        names: set[str] = set()
        for name, field in model.model_fields.items():
            kind = field.annotation
            names |= leaves(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else {name}
        return names

    code = [path for path in [*(ROOT / "swarmtrain").rglob("*.py"), ROOT / "training_code.py", ROOT / "datautils.py"] if path.exists()]
    source = "\n".join(path.read_text() for path in code)
    # Derived sizes are read through properties of TopologyConfig.
    unread = {name for name in leaves(Config) | leaves(TrainingGroupConfig) if f".{name}" not in source}
    assert unread == set()
