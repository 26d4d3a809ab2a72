"""The contents that an image records, compared with the local files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.cargo.docker_ignore import list_files
from swarmtrain.images import contents
from swarmtrain.images.contents import ImageContents
from swarmtrain.images.project import find_project


@pytest.fixture
def project_folder(tmp_path: Path) -> Path:
    """A folder with a script, its own Dockerfile, and a package."""
    (tmp_path / "lib").mkdir()
    for name in ("train.py", "helpers.py", "Dockerfile", "lib/a.py"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def image_contents(project_folder: Path) -> ImageContents:
    """The contents of an image with all of `project_folder`, read back from its label."""
    built = contents.compute_image_contents(find_project(project_folder)).copy_with_added_folder(
        "lib", list_files(project_folder / "lib"), base_image="reg/base:1"
    )
    return contents.read_image_contents({"Config": {"Labels": built.to_labels()}})


def list_changes(image_contents: ImageContents, project_folder: Path) -> tuple[list[str], list[str]]:
    return contents.find_changed_files_and_folders(image_contents, project_folder, {"train.py"})


def test_nothing_has_changed_at_first(image_contents: ImageContents, project_folder: Path) -> None:
    assert sorted(image_contents.built_digests) == ["Dockerfile", "helpers.py", "swarmtrain", "train.py"]
    assert list_changes(image_contents, project_folder) == ([], [])


def test_what_travels_with_the_run_is_never_outdated(image_contents: ImageContents, project_folder: Path) -> None:
    (project_folder / "train.py").write_text("new")
    assert list_changes(image_contents, project_folder) == ([], [])


@pytest.mark.parametrize(
    ("name", "expected"), [("helpers.py", (["helpers.py"], [])), ("Dockerfile", (["Dockerfile"], [])), ("lib/a.py", ([], ["lib"]))]
)
def test_a_file_that_changed_is_named(
    image_contents: ImageContents, project_folder: Path, name: str, expected: tuple[list[str], list[str]]
) -> None:
    (project_folder / name).write_text("new")
    assert list_changes(image_contents, project_folder) == expected


def test_in_the_folder_itself_what_travels_is_distinguished_from_the_rest(project_folder: Path) -> None:
    made = ImageContents({}).copy_with_added_folder(".", list_files(project_folder), base_image="reg/base:1")
    (project_folder / "train.py").write_text("new")
    assert list_changes(made, project_folder) == ([], [])
    (project_folder / "helpers.py").write_text("new")
    (project_folder / "lib" / "b.py").touch()
    assert list_changes(made, project_folder) == (["helpers.py"], ["."])


def test_another_swarmtrain_is_named(image_contents: ImageContents, project_folder: Path) -> None:
    older = replace(image_contents, built_digests={**image_contents.built_digests, "swarmtrain": "older"})
    assert list_changes(older, project_folder) == (["swarmtrain"], [])


def test_no_change_is_reported_where_nothing_is_known(
    image_contents: ImageContents, tmp_path_factory: pytest.TempPathFactory, project_folder: Path
) -> None:
    assert list_changes(image_contents, tmp_path_factory.mktemp("elsewhere")) == ([], [])
    for label in (None, {}, {"swarmtrain.contents": "[]"}, {"swarmtrain.contents": "{"}, {"swarmtrain.contents": '{"later": 1}'}):
        assert contents.read_image_contents({"Config": {"Labels": label}}) == ImageContents({})
    assert list_changes(ImageContents({}), project_folder) == ([], [])


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
def test_the_command_rebuilds_the_same_image(
    image_contents: ImageContents, tag: str, built: list[str], added: list[str], command: str
) -> None:
    assert contents.build_rebuild_command(tag, image_contents, built, added) == command


def test_an_image_without_added_code_is_built_under_its_own_tag() -> None:
    assert (
        contents.build_rebuild_command("reg/x:2", ImageContents({"swarmtrain": "old"}), ["swarmtrain"], [])
        == "swarmtrain image build . --tag reg/x:2 --push"
    )
