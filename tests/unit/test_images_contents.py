"""What an image says of its contents, compared with what lies here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.images import contents, folder
from swarmtrain.images.contents import Contents
from swarmtrain.images.project import project


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a script, a Dockerfile of its own, and a package."""
    (tmp_path / "lib").mkdir()
    for name in ("train.py", "helpers.py", "Dockerfile", "lib/a.py"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def image(here: Path) -> Contents:
    """The contents of an image that has all of it, read back from its label."""
    made = contents.of(project(here)).plus("lib", folder.files(here / "lib"), below="reg/base:1")
    return contents.read({"Config": {"Labels": made.labels()}})


def changed(image: Contents, here: Path) -> tuple[list[str], list[str]]:
    return contents.changed(image, here, {"train.py"})


def test_nothing_has_changed_at_first(image: Contents, here: Path) -> None:
    assert sorted(image.built) == ["Dockerfile", "helpers.py", "swarmtrain", "train.py"]
    assert changed(image, here) == ([], [])


def test_what_travels_with_the_run_is_never_old(image: Contents, here: Path) -> None:
    (here / "train.py").write_text("new")
    assert changed(image, here) == ([], [])


@pytest.mark.parametrize(
    ("name", "found"), [("helpers.py", (["helpers.py"], [])), ("Dockerfile", (["Dockerfile"], [])), ("lib/a.py", ([], ["lib"]))]
)
def test_a_file_that_changed_is_named(image: Contents, here: Path, name: str, found: tuple[list[str], list[str]]) -> None:
    (here / name).write_text("new")
    assert changed(image, here) == found


def test_in_the_folder_itself_what_travels_is_told_from_the_rest(here: Path) -> None:
    made = Contents({}).plus(".", folder.files(here), below="reg/base:1")
    (here / "train.py").write_text("new")
    assert changed(made, here) == ([], [])
    (here / "helpers.py").write_text("new")
    (here / "lib" / "b.py").touch()
    assert changed(made, here) == (["helpers.py"], ["."])


def test_another_swarmtrain_is_named(image: Contents, here: Path) -> None:
    older = replace(image, built={**image.built, "swarmtrain": "older"})
    assert changed(older, here) == (["swarmtrain"], [])


def test_nothing_is_said_where_nobody_knows(image: Contents, tmp_path_factory: pytest.TempPathFactory, here: Path) -> None:
    assert changed(image, tmp_path_factory.mktemp("elsewhere")) == ([], [])
    for label in (None, {}, {"swarmtrain.contents": "[]"}, {"swarmtrain.contents": "{"}, {"swarmtrain.contents": '{"later": 1}'}):
        assert contents.read({"Config": {"Labels": label}}) == Contents({})
    assert changed(Contents({}), here) == ([], [])


@pytest.mark.parametrize(
    ("tag", "built", "added", "command"),
    [
        ("reg/x:2", [], ["lib"], "swarmtrain image add lib --to reg/base:1 --tag reg/x:2 --push"),
        (
            "reg/x:2",
            ["swarmtrain"],
            [],
            "swarmtrain image build . --tag reg/base:1 --push && swarmtrain image add lib --to reg/base:1 --tag reg/x:2 --push",
        ),
        ("reg/x@sha256:00", [], ["lib"], "swarmtrain image add lib --to reg/base:1 --tag reg/x:TAG --push"),
    ],
)
def test_the_command_makes_the_same_image_anew(image: Contents, tag: str, built: list[str], added: list[str], command: str) -> None:
    assert contents.rebuild(tag, image, built, added) == command


def test_an_image_without_added_code_is_built_under_its_own_tag() -> None:
    assert (
        contents.rebuild("reg/x:2", Contents({"swarmtrain": "old"}), ["swarmtrain"], []) == "swarmtrain image build . --tag reg/x:2 --push"
    )
