"""Code placement in a swarm: Swarm configs while the code is small, otherwise a layer that a deploy after an edit uses again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config.loader import parse_config
from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import code_placement
from swarmtrain.launchers.swarm.code_placement import CodeLayer, find_layer, fits_in_configs, place_code_in_layer, restore_code_from_layer
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.stack_document import render_stack

BASE = "registry:5000/me/swarmtrain:latest"


class FakeEngine:
    """An engine whose registry has the images `digests`."""

    def __init__(self) -> None:
        self.digests = {BASE: "sha256:" + "a" * 64}

    def inspect_distribution(self, image: str) -> Any:
        if image not in self.digests:
            raise EngineError("manifest unknown", status=404)
        return {"Descriptor": {"digest": self.digests[image]}, "Platforms": []}


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(fake_engine: FakeEngine) -> DockerEngine:
    return cast("DockerEngine", fake_engine)


def make_plan(files: dict[str, bytes]) -> Plan:
    config = parse_config(f"runner: {{script: train.py, code: [.], docker_config: {{docker_container: '{BASE}'}}}}")
    code = tuple(RunFile.from_content(name, content) for name, content in {"train.py": b"train", **files}.items())
    return build_plan(
        config, Inventory("test", (Machine("gpu-1", id="id1", is_manager=True, address="10.0.0.1"),)), Cargo(code), run="demo"
    )


def make_big_plan(**changed: bytes) -> Plan:
    return make_plan(
        {f"src/file{index}.py": b"x = %d" % index for index in range(150)} | {f"src/{name}.py": text for name, text in changed.items()}
    )


@pytest.fixture
def layer(engine: DockerEngine) -> CodeLayer:
    """The layer that was built for `make_big_plan()`."""
    return code_placement.describe_new_layer(engine, make_big_plan())[0]


def test_small_code_needs_no_layer() -> None:
    assert fits_in_configs(make_plan({f"f{index}.py": b"x" for index in range(99)}).cargo.code)
    assert not fits_in_configs(make_plan({f"f{index}.py": b"x" for index in range(100)}).cargo.code)
    assert not fits_in_configs(make_plan({"table.py": b"x" * 1_024_000}).cargo.code)
    assert not fits_in_configs(make_plan({f"f{index}.py": b"x" * 900_000 for index in range(5)}).cargo.code)


def test_a_layer_is_built_only_if_the_registry_lacks_it(fake_engine: FakeEngine, engine: DockerEngine, layer: CodeLayer) -> None:
    assert find_layer(engine, make_big_plan(), None) is None
    fake_engine.digests[layer.image] = "sha256:" + "b" * 64
    assert find_layer(engine, make_big_plan(), None) == layer
    assert find_layer(engine, make_big_plan(file7=b"other"), None) is None
    assert layer.image.startswith("registry:5000/me/swarmtrain:code-")
    assert "train.py" not in layer.digests  # the script is sent with each deploy


def test_after_an_edit_only_the_changed_files_are_sent(engine: DockerEngine, layer: CodeLayer) -> None:
    edited_plan = make_big_plan(file7=b"other", new=b"new")
    assert find_layer(engine, edited_plan, layer) == layer
    placed_plan = place_code_in_layer(edited_plan, layer)
    names = ["train.py", "src/file7.py", "src/new.py", code_placement.MANIFEST_NAME]
    assert [file.name for file in placed_plan.cargo.code] == names
    document = render_stack(placed_plan).document
    assert {service["image"] for service in document["services"].values()} == {layer.image}
    targets = [item["target"] for item in document["services"]["node0"]["configs"]]
    assert targets[1:] == [f"/workspace/{name}" for name in names]


def test_a_new_layer_after_a_removal_a_new_base_image_or_many_edits(
    fake_engine: FakeEngine, engine: DockerEngine, layer: CodeLayer
) -> None:
    plan = make_big_plan()
    shorter_plan = replace(plan, cargo=Cargo(plan.cargo.code[:-1]))
    assert find_layer(engine, shorter_plan, layer) is None
    assert find_layer(engine, make_big_plan(**{f"file{index}": b"edited" for index in range(101)}), layer) is None
    fake_engine.digests[BASE] = "sha256:" + "c" * 64
    assert find_layer(engine, plan, layer) is None


def test_the_plan_of_the_deployed_run_is_restored(engine: DockerEngine, layer: CodeLayer) -> None:
    plan = make_big_plan(file7=b"other")
    placed_plan = place_code_in_layer(plan, layer)
    config, files = restore_code_from_layer(placed_plan.config, placed_plan.cargo.code)
    assert config == plan.config
    assert {file.name: file.digest for file in files} == {file.name: file.digest for file in plan.cargo.code}
    # A scaled run is planned from this, and keeps its layer even if the base image has changed since.
    files.sort(key=lambda file: (file.name != "train.py", file.name))
    scaled_plan = replace(plan, cargo=Cargo(tuple(files)))
    assert not fits_in_configs(scaled_plan.cargo.code)
    assert find_layer(engine, scaled_plan, replace(layer, pinned_base="another")) == replace(layer, pinned_base="another")
    assert {file.name for file in place_code_in_layer(scaled_plan, layer).cargo.code} == {file.name for file in placed_plan.cargo.code}


def test_a_manifest_is_json(layer: CodeLayer) -> None:
    manifest = layer.to_manifest()
    assert json.loads(manifest.content)["base_image"] == BASE
    assert CodeLayer.from_manifest(manifest) == layer
    assert Path(manifest.name).suffix == ".json"
