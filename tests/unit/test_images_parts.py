"""The parts of image building that need no engine: names, contexts, and where Debian packages come from."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from swarmtrain.errors import ImageError
from swarmtrain.images import context
from swarmtrain.images.base import apt_sources
from swarmtrain.images.pin import untagged


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("swarmtrain", "swarmtrain"),
        ("swarmtrain:0.1", "swarmtrain"),
        ("registry.lab:5000/swarmtrain", "registry.lab:5000/swarmtrain"),
        ("registry.lab:5000/swarmtrain:0.1", "registry.lab:5000/swarmtrain"),
        ("registry.lab:5000/a/b:0.1@sha256:00", "registry.lab:5000/a/b"),
        ("a/b@sha256:00", "a/b"),
    ],
)
def test_a_registrys_port_is_no_tag(image: str, name: str) -> None:
    assert untagged(image) == name


def project(folder: Path) -> Path:
    for name in (
        *context.CONTENTS,
        "build/wheels/torch.whl",
        "build/wheels/.complete",
        "build/package/swarmtrain.whl",
        "runs/secret",
        ".env",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def packed(folder: Path) -> bytes:
    into = io.BytesIO()
    context.pack(folder, into)
    return into.getvalue()


def test_the_context_holds_what_the_dockerfile_copies_and_nothing_else(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(project(tmp_path)))) as archive:
        assert sorted(archive.getnames()) == sorted([*context.CONTENTS, "build/wheels/torch.whl", "build/package/swarmtrain.whl"])


def test_the_context_depends_on_contents_alone(tmp_path: Path) -> None:
    first = packed(project(tmp_path))
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert packed(tmp_path) == first
    (tmp_path / "training_code.py").write_text("changed")
    assert packed(tmp_path) != first


def test_a_folder_that_is_no_project_names_all_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").touch()
    with pytest.raises(ImageError) as caught:
        context.check(tmp_path)
    assert "requirements/image.txt, training_code.py, datautils.py" in caught.value.message
    assert "Dockerfile" not in caught.value.message


def test_only_sources_of_the_suite_are_used(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("# deb nowhere bookworm main\ndeb [signed-by=/key] somewhere bookworm main\n")
    for name, text in {
        "debian.sources": "Types: deb\nURIs: somewhere\nSuites: bookworm bookworm-updates\nComponents: main\n",
        "other.list": "deb elsewhere cloud-sdk-bookworm main\n",
        "older.sources": "Types: deb\nSuites: bullseye\n",
        "notes.txt": "deb nowhere bookworm main\n",
    }.items():
        (tmp_path / "sources.list.d" / name).write_text(text)
    assert [file.name for file in apt_sources("bookworm", tmp_path)] == ["sources.list", "debian.sources"]
    assert apt_sources("trixie", tmp_path) == []
