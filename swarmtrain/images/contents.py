"""Contents of an image, stored as digests in an image label, so that files that changed since the build can be detected."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import swarmtrain
from swarmtrain.cargo.docker_ignore import FolderEntry, list_files
from swarmtrain.images import folder_archive as folders
from swarmtrain.images.pinning import is_content_addressed, strip_tag
from swarmtrain.images.project import Project
from swarmtrain.protocol import LABEL_CONTENTS

WORKING_FOLDER = "."
"""Name under which the working folder itself is listed."""
_SWARMTRAIN = "swarmtrain"


@dataclass(frozen=True)
class ImageContents:
    """Contents of an image as digests by name: `swarmtrain`, and files by their path in the folder that the image was built from."""

    built_digests: Mapping[str, str]
    added_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of folders that were added in layers on top of `base_image`."""
    base_image: str = ""

    def copy_with_added_folder(self, name: str, entries: list[FolderEntry], *, base_image: str) -> ImageContents:
        """Return the contents of the image that results from adding the folder `name` in a layer on top of `base_image`."""
        top_level_files = {entry: _compute_file_digest(path) for entry, path in entries if name == WORKING_FOLDER and "/" not in entry}
        return replace(
            self,
            built_digests={**self.built_digests, **top_level_files},
            added_digests={**self.added_digests, name: _compute_added_folder_digest(name, entries)},
            base_image=base_image,
        )

    def to_labels(self) -> dict[str, str]:
        """Return the image label that stores these contents as JSON."""
        return {
            LABEL_CONTENTS: json.dumps(
                {"built_digests": self.built_digests, "added_digests": self.added_digests, "base_image": self.base_image}, sort_keys=True
            )
        }


def compute_image_contents(project: Project) -> ImageContents:
    """Return the contents of an image that would be built from `project` now."""
    candidates = (project.dockerfile, project.pins, project.lock, project.requirements, *project.code)
    project_files = [path for path in candidates if path and path.is_relative_to(project.folder)]
    return ImageContents(
        {
            _SWARMTRAIN: compute_swarmtrain_digest(),
            **{str(path.relative_to(project.folder)): _compute_file_digest(path) for path in project_files},
        }
    )


def read_image_contents(image_info: Mapping[str, object]) -> ImageContents:
    """Return the contents stored in the label of an inspected image; empty if there is no label, or if another version wrote it."""
    config = image_info.get("Config")
    labels = config.get("Labels") if isinstance(config, dict) else None
    try:
        return ImageContents(**json.loads((labels or {})[LABEL_CONTENTS]))
    except (KeyError, ValueError, TypeError):
        return ImageContents({})


def find_changed_files_and_folders(
    image_contents: ImageContents, working_folder: Path, sent_file_names: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the files and the added folders of the image that differ from those in `working_folder` now.

    Files that do not exist in `working_folder` are ignored. `sent_file_names` are files that are sent with each run, regardless of the
    image's copies.
    """
    changed_files = [
        name
        for name, digest in image_contents.built_digests.items()
        if name not in sent_file_names and _compute_current_digest(name, working_folder) not in (None, digest)
    ]
    existing_folders = [(name, digest) for name, digest in image_contents.added_digests.items() if (working_folder / name).is_dir()]
    changed_folders = [
        name for name, digest in existing_folders if _compute_added_folder_digest(name, list_files(working_folder / name)) != digest
    ]
    return sorted(changed_files), sorted(changed_folders)


def build_rebuild_command(image: str, image_contents: ImageContents, changed_files: list[str], changed_folders: list[str]) -> str:
    """Return the command that rebuilds `image` after `changed_files` and `changed_folders` have changed."""
    is_distributed = is_content_addressed(image)
    tag = f"{strip_tag(image)}:TAG" if is_distributed or "@" in image else image
    push_option = "" if is_distributed else " --push"
    commands = [f"swarmtrain image build . --tag {image_contents.base_image or tag}{push_option}"] if changed_files else []
    if image_contents.added_digests and (changed_folders or changed_files):
        commands += [
            f"swarmtrain image add {' '.join(sorted(image_contents.added_digests))} --to {image_contents.base_image} --tag "
            f"{tag}{push_option}"
        ]
    return " && ".join([*commands, *([f"swarmtrain image distribute {tag}"] if is_distributed else [])])


def compute_swarmtrain_digest() -> str:
    """Return the digest of the running swarmtrain package, including the Dockerfile and the requirements that it ships."""
    package_folder = Path(swarmtrain.__file__).parent
    return folders.compute_entries_digest(
        (name, path.resolve()) for name, path in list_files(package_folder) if not path.name.startswith(".")
    )


def _compute_current_digest(name: str, working_folder: Path) -> str | None:
    if name == _SWARMTRAIN:
        return compute_swarmtrain_digest()
    return _compute_file_digest(working_folder / name) if (working_folder / name).is_file() else None


def _compute_added_folder_digest(name: str, entries: list[FolderEntry]) -> str:
    """Return the digest of a folder added to an image.

    Files at the top level of WORKING_FOLDER have their own digests, since some of them are sent with each run.
    """
    return folders.compute_entries_digest(entry for entry in entries if name != WORKING_FOLDER or "/" in entry[0])


def _compute_file_digest(path: Path) -> str:
    return folders.compute_entries_digest([(path.name, path.resolve())])
