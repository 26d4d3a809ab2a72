"""`runner.code`: files, folders and patterns, and which files of a folder are shipped."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from swarmtrain.cargo import Cargo, RunFile, read_cargo
from swarmtrain.config.loader import parse_config
from swarmtrain.errors import PlanError, SwarmtrainError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a script, a package, a data file, and files that must not be shipped."""
    project = tmp_path / "project"
    for name in (
        "train.py",
        "src/model.py",
        "src/layers/norm.py",
        "src/layers/__pycache__/norm.pyc",
        "configs/small.yaml",
        "notes.txt",
        "runs/mine/step-1/weights.bin",
        "logs/rank0.log",
        "token.txt",
        ".env",
        "deploy/.env.production",
        "deploy/id_ed25519",
        "deploy/tls/server.pem",
        ".aws/credentials",
        "hosts",
        "env/pyvenv.cfg",
        "env/lib/torch.py",
        "compose/generated.yml",
        "compose/generated/config-0123456789.json",
    ):
        write(project / name, name)
    write(project / "src/__init__.py", "")
    write(tmp_path / "elsewhere/tools/helper.py", "helper")
    monkeypatch.chdir(project)
    return project


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def list_names(runner: str) -> list[str]:
    return [file.name for file in read_code(runner).code]


def read_code(runner: str) -> Cargo:
    text = f"runner: {{script: train.py, {runner}}}\ntrainer: {{save_dir: runs/mine}}\nlogger: {{log_dir: logs}}\n"
    return read_cargo(parse_config(text), Path.cwd())


SOURCES = ["src/__init__.py", "src/layers/norm.py", "src/model.py"]


def test_a_folder_keeps_its_path_and_an_empty_file_is_a_line_feed() -> None:
    cargo = read_code("code: [src]")
    assert [file.name for file in cargo.code] == ["train.py", *SOURCES]
    assert cargo.code[1].content == b"\n"


def test_the_working_folder_without_what_the_run_writes_and_reads() -> None:
    expected = ["train.py", "configs/small.yaml", "notes.txt", *SOURCES]
    assert list_names("code: [.], secrets: {TOKEN: token.txt}, hostsfile: hosts, runner_type: ssh") == expected


def test_the_secret_of_a_channel_is_not_code(folder: Path) -> None:
    secret = f"http://receiver/\nwhsec_{base64.b64encode(bytes(32)).decode()}\n"
    write(folder / "webhook.secret", secret)
    text = "runner: {script: train.py, code: [.]}\ntrainer: {save_dir: runs/mine}\nnotify: {ci: {secret: webhook.secret}}\n"
    cargo = read_cargo(parse_config(text), Path.cwd())
    assert "webhook.secret" not in [file.name for file in cargo.code]
    assert [file.name for file in cargo.secrets] == ["notify-ci"]


def test_patterns_match_files() -> None:
    assert list_names("code: ['src/**/*.py', 'conf*/*.yaml']") == ["train.py", "configs/small.yaml", *SOURCES]
    assert list_names("code: ['src/layers/**']") == ["train.py", "src/layers/norm.py"]


def test_what_git_and_dockerignore_ignore_is_not_shipped(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    write(folder / ".gitignore", "notes.txt\n/compose/\n/env\n/hosts\n/token.txt\n")
    write(folder / ".dockerignore", "configs\n.gitignore\n")
    assert list_names("code: [.]") == ["train.py", *SOURCES]
    assert list_names("code: [src, notes.txt]") == ["train.py", "notes.txt", *SOURCES]
    write(folder / ".dockerignore", "*\n")  # the .dockerignore of an image with other files
    assert list_names("code: [src]") == ["train.py", *SOURCES]
    write(folder / "src/.dockerignore", "layers\n")
    assert list_names("code: [src]") == ["train.py", "src/__init__.py", "src/model.py"]


def test_a_folder_that_git_ignores_is_shipped_if_it_is_listed(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    write(folder / ".gitignore", "src\n")
    assert list_names("code: [src]") == ["train.py", *SOURCES]


def test_files_of_a_nested_repository_are_shipped(folder: Path) -> None:
    for repository in (folder / "src/layers", folder):
        subprocess.run(["git", "-C", str(repository), "init", "--quiet"], check=True)
    write(folder / "src/layers/.gitignore", "scratch.py\n")
    write(folder / "src/layers/scratch.py", "scratch")
    assert "src/layers/norm.py" in list_names("code: [src]")
    assert "src/layers/scratch.py" not in list_names("code: [src]")


def test_files_from_elsewhere_are_put_at_the_top(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    assert list_names("code: [../elsewhere/tools]") == ["train.py", "tools/helper.py"]
    assert list_names(f"code: ['{elsewhere}/tools/helper.py']") == ["train.py", "helper.py"]
    assert [file.name for file in read_cargo(parse_config(f"runner: {{script: {elsewhere}/tools/helper.py}}"), folder).code] == [
        "helper.py"
    ]


def test_a_file_that_is_listed_twice_is_shipped_once() -> None:
    assert list_names("code: [src, src/model.py, train.py]") == ["train.py", *SOURCES]


def test_two_files_with_one_name_are_refused(folder: Path) -> None:
    write(folder.parent / "train.py", "other")
    with pytest.raises(PlanError, match=r"train\.py and .*train\.py would both be shipped as train\.py"):
        read_code("code: [../train.py]")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("[nothing]", r"config runner\.code: .*nothing: no such file"),
        ("['*.cpp']", r"\*\.cpp: the pattern matches no file in"),
        ("[runs]", "runs: has no files, or git or its .dockerignore ignores all of them"),
        (f"[{'x' * 300}]", "file name too long"),
    ],
)
def test_an_entry_without_files_is_refused(code: str, message: str) -> None:
    with pytest.raises(SwarmtrainError, match=message):
        read_code(f"code: {code}")


def test_too_much_code_is_refused_with_the_largest_folders(folder: Path) -> None:
    write(folder / "data/corpus.bin", "")
    with (folder / "data/corpus.bin").open("wb") as file:
        file.truncate(300_000_000)
    with pytest.raises(PlanError, match=r"files of 300 MB, but at most .* the largest: data \(300 MB\)") as caught:
        read_code("code: [.]")
    assert ".dockerignore" in str(caught.value.hint)


def test_git_that_fails_is_reported_instead_of_shipping_ignored_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / ".git").mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PlanError, match="is in a git worktree, but git cannot list its files"):
        read_code("code: [src]")


def test_the_digest_depends_on_names_and_contents() -> None:
    cargoes = [
        Cargo((RunFile.from_content(name, content),), secrets)
        for name, content, secrets in (
            ("a.py", b"1", ()),
            ("b.py", b"1", ()),
            ("a.py", b"2", ()),
            ("a.py", b"1", (RunFile.from_content("KEY", b"1"),)),
        )
    ]
    assert len({cargo.digest for cargo in cargoes}) == len(cargoes)
