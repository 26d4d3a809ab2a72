"""Place the code files of a run: as Swarm configs if they are few and small, otherwise in a layer of the image.

A layer is used as long as the run exists: a deploy after an edit sends the changed files as Swarm configs and builds nothing, unless files
were removed or too many have changed. A manifest, one more code file, says which files are in the layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from swarmtrain.cargo import RunFile
from swarmtrain.config import Config
from swarmtrain.errors import ImageError
from swarmtrain.images import add_file_layer, distribute_image, pin_image, push_image
from swarmtrain.images.pinning import PinnedImage, is_content_addressed, strip_tag
from swarmtrain.images.swarm_nodes import list_other_engines
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.planning.plan import Plan
from swarmtrain.render.stack_document import MAX_CONFIG_BYTES

MANIFEST_NAME = ".swarmtrain-code-layer.json"
"""Name of the manifest of a layer, next to the code files."""
_MAX_CONFIGS, _MAX_TOTAL_BYTES = 100, 4_000_000
_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step: it may be pulling gigabytes


@dataclass(frozen=True)
class CodeLayer:
    """An image with a layer of code files."""

    image: str
    """Name of the image with the layer."""
    base_image: str
    """Name of the image that the config names."""
    pinned_base: str
    """Pinned reference of the base image when the layer was built."""
    digests: Mapping[str, str]
    """Digests of the files in the layer, by name."""

    @classmethod
    def from_manifest(cls, manifest: RunFile) -> CodeLayer:
        """Return the layer that `manifest` describes."""
        return cls(**json.loads(manifest.content))

    def to_manifest(self) -> RunFile:
        """Return the manifest of this layer."""
        return RunFile.from_content(MANIFEST_NAME, json.dumps(asdict(self), sort_keys=True).encode())


def fits_in_configs(files: Sequence[RunFile]) -> bool:
    """Return whether `files` can be sent as Swarm configs, which every manager stores in memory.

    A file without content is in the layer of the deployed run from which the plan was made.
    """
    sizes = [len(file.content) for file in files]
    return len(sizes) <= _MAX_CONFIGS and sum(sizes) <= _MAX_TOTAL_BYTES and max(sizes, default=0) < MAX_CONFIG_BYTES and all(sizes)


def find_layer(engine: DockerEngine, plan: Plan, deployed_layer: CodeLayer | None) -> CodeLayer | None:
    """Return a layer with the code of `plan` that exists: the one of the deployed run, or one in the registry. None: build one."""
    pinned_base = pin_image(engine, _get_base_image(plan)).reference
    if deployed_layer is not None and _is_layer_usable(deployed_layer, plan, pinned_base):
        return deployed_layer
    if is_content_addressed(_get_base_image(plan)):
        return None
    layer = _describe_new_layer(plan, pinned_base)
    try:
        pin_image(engine, layer.image)
    except ImageError:
        return None
    return layer


def build_layer(engine: DockerEngine, plan: Plan, report_progress: ProgressReporter) -> CodeLayer:
    """Build an image with the code of `plan`, and push it to the registry of the plan's image, or copy it to all nodes.

    It is copied if the plan's image was distributed to the nodes without a registry. Raises ImageError.
    """
    base_image = _get_base_image(plan)
    layer = _describe_new_layer(plan, pin_image(engine, base_image).reference)
    patient_engine = DockerEngine(engine.address, timeout=_ENGINE_TIMEOUT_SECONDS)
    files = {file.name: file.content for file in _list_layer_files(plan)}
    # The pinned image, not the tag: this engine may have an older image under the tag than the registry.
    add_file_layer(patient_engine.client, files, layer.pinned_base, layer.image, report_progress=report_progress)
    if not is_content_addressed(base_image):
        push_image(patient_engine.client, layer.image, report_progress=report_progress)
        return layer
    tag = distribute_image(
        patient_engine.client,
        layer.image,
        list_other_engines(engine),
        lambda address: DockerEngine(address, timeout=_ENGINE_TIMEOUT_SECONDS).client,
        report_progress=report_progress,
    )
    return replace(layer, image=tag)


def place_code_in_layer(plan: Plan, layer: CodeLayer) -> Plan:
    """Return `plan` with the image of `layer`, and only the code files that differ from those in it, and its manifest."""
    changed_files = [file for file in plan.cargo.code if layer.digests.get(file.name) != file.digest]
    cargo = replace(plan.cargo, code=(*changed_files, layer.to_manifest()))
    return replace(plan, config=_set_image(plan.config, layer.image), cargo=cargo)


def restore_code_from_layer(config: Config, files: Sequence[RunFile]) -> tuple[Config, list[RunFile]]:
    """Return the config and all code files from those of a deployed run, the inverse of `place_code_in_layer`.

    The contents of the files in the layer are unknown, and empty here.
    """
    manifest = next((file for file in files if file.name == MANIFEST_NAME), None)
    if manifest is None:
        return config, list(files)
    layer = CodeLayer.from_manifest(manifest)
    sent_files = {file.name: file for file in files if file is not manifest}
    layer_files = {name: RunFile(name, b"", digest) for name, digest in layer.digests.items()}
    return _set_image(config, layer.base_image), list((layer_files | sent_files).values())


def describe_new_layer(engine: DockerEngine, plan: Plan) -> tuple[CodeLayer, PinnedImage]:
    """Return the layer that `build_layer` would build for `plan`, and its image, which has no digest yet. Used for a dry run."""
    base = pin_image(engine, _get_base_image(plan))
    layer = _describe_new_layer(plan, base.reference)
    return layer, PinnedImage(layer.image, base.platforms)


def _is_layer_usable(layer: CodeLayer, plan: Plan, pinned_base: str) -> bool:
    if not all(file.content for file in plan.cargo.code):
        return True  # the plan was made from the deployed run
    changed_files = [file for file in plan.cargo.code if layer.digests.get(file.name) != file.digest]
    is_complete = layer.digests.keys() <= {file.name for file in plan.cargo.code}  # a config cannot remove a file of the image
    return layer.pinned_base == pinned_base and is_complete and fits_in_configs(changed_files)


def _describe_new_layer(plan: Plan, pinned_base: str) -> CodeLayer:
    digests = {file.name: file.digest for file in _list_layer_files(plan)}
    layer_digest = hashlib.sha256(json.dumps([pinned_base, digests], sort_keys=True).encode()).hexdigest()[:12]
    base_image = _get_base_image(plan)
    return CodeLayer(f"{strip_tag(base_image)}:code-{layer_digest}", base_image, pinned_base, digests)


def _list_layer_files(plan: Plan) -> list[RunFile]:
    """Return the code files for a layer: all except the script, which is edited most often, and which shows how the run trains."""
    return [file for file in plan.cargo.code if file.name != plan.config.runner.script_name]


def _get_base_image(plan: Plan) -> str:
    return plan.config.runner.docker_config.docker_container


def _set_image(config: Config, image: str) -> Config:
    docker = config.runner.docker_config.model_copy(update={"docker_container": image})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"docker_config": docker})})
