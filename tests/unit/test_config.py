"""The meaning of a config after it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pydantic import BaseModel, ValidationError

from swarmtrain.config import Config, presets
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.config.starter_files import render_template
from swarmtrain.errors import ConfigError


def test_the_template_loads_and_shows_the_defaults() -> None:
    assert parse_config(render_template()) == Config()


@pytest.mark.parametrize("name", presets.PRESET_NAMES)
def test_the_template_of_a_well_known_shape_loads_and_shows_it(name: str) -> None:
    assert parse_config(render_template(name)) == Config(transformer_architecture=presets.load_preset(name))


def test_the_template_explains_every_field() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        return [f"{model.__name__}.{name}" for name, field in model.model_fields.items() if not field.description]

    sections = [type(getattr(Config(), name)) for name in Config.model_fields if isinstance(getattr(Config(), name), BaseModel)]
    assert [name for section in [Config, *sections] for name in undescribed(section)] == []


def test_json_carries_the_whole_config_and_the_same_config_gives_the_same_bytes() -> None:
    config = parse_config(
        "runner: {hosts: [a, b slots=2], docker_config: {docker_mounts: [/x, /y], memory: 2g}}\nscript: {mine: [1, {a: b}]}"
    )
    assert Config.from_json(config.to_json()) == config
    assert Config.from_json(config.to_json()).to_json() == config.to_json()


def test_ctrl_c_interrupts_the_serialization_of_a_config() -> None:
    class Interrupted(type(Path())):  # type: ignore[misc]
        def __str__(self) -> str:
            raise KeyboardInterrupt

    config = Config()
    config = config.model_copy(update={"logger": config.logger.model_copy(update={"log_dir": Interrupted("logs")})})
    with pytest.raises(KeyboardInterrupt):
        config.to_json()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().trainer.seed = 1  # type: ignore[misc]  # that is the point


def test_what_scaling_changes_is_not_in_the_config_of_nodes() -> None:
    three = parse_config("{}", ["runner.nodes=3", "runner.min_nodes=1", "runner.max_nodes=4"])
    four = parse_config("{}", ["runner.nodes=4", "runner.min_nodes=1", "runner.hosts=[a, b, c, d]"])
    assert three.to_node_config().digest == four.to_node_config().digest
    assert three.to_node_config().to_node_config() == three.to_node_config()
    assert parse_config("{}", ["runner.nodes=3"]).to_node_config().digest != three.to_node_config().digest


def test_a_flat_list_of_mounts_is_read_as_pairs() -> None:
    mounts = parse_config("runner: {docker_config: {docker_mounts: [/a, /b, /c, /d]}}").runner.docker_config.docker_mounts
    assert mounts == (("/a", "/b"), ("/c", "/d"))


@pytest.mark.parametrize(
    ("given_sizes", "derived"),
    [
        ({"world_size": 8, "model_parallel_size": 2}, {"data_parallel_size": 4}),
        ({"world_size": 8, "data_parallel_size": 2}, {"model_parallel_size": 4}),
        ({"model_parallel_size": 2, "data_parallel_size": 2}, {"world_size": 4}),
    ],
)
def test_three_parallel_sizes_determine_the_fourth(given_sizes: dict[str, int], derived: dict[str, int]) -> None:
    topology = TopologyConfig(global_batch_size=8, micro_batch_size=1, **given_sizes)
    assert {name: getattr(topology, name) for name in derived} == derived


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"global_batch_size": 24, "micro_batch_size": 2}, (24, 2)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 3, "data_parallel_size": 4}, (24, 2)),
        ({"global_batch_size": 24, "gradient_accumulation_steps": 3, "data_parallel_size": 4}, (24, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(sizes: dict[str, int], batch: tuple[int, int]) -> None:
    topology = TopologyConfig(**sizes)
    assert (topology.samples_per_step, topology.samples_per_micro_batch) == batch


@given(micro=some.integers(1, 8), count=some.integers(1, 64), world=some.integers(1, 40))
def test_every_micro_batch_is_assigned_once_and_counts_differ_by_at_most_one(micro: int, count: int, world: int) -> None:
    deal = TopologyConfig(global_batch_size=micro * count, micro_batch_size=micro).assign_micro_batches(world)
    assert sum(deal) == count
    assert len(deal) == world
    assert max(deal) - min(deal) <= 1


IMAGES = (
    "ubuntu", "ubuntu:24.04", "registry.lab:5000/swarmtrain:latest", "Registry.Example.com/team/a-b__c.d:V1", "localhost/x", "[::1]:5000/x",
    f"nvcr.io/nvidia/pytorch:25.01-py3@sha256:{'0' * 64}", f"x@sha256:{'a' * 64}",
)  # fmt: skip


@pytest.mark.parametrize("image", IMAGES)
def test_images_that_docker_takes_are_taken(image: str) -> None:
    assert parse_config("{}", [f"runner.docker_config.docker_container='{image}'"]).runner.docker_config.docker_container == image


def test_names_that_clusters_have_are_taken() -> None:
    config = parse_config("""
        runner:
          hosts: [gpu-1, GPU_2.example.com slots=8, 10.0.0.3, "9vqmpfv2n8kzmsqb0xqvzl3mb slots=2"]
          docker_config: {docker_mounts: [cache_1.x, /cache, "/mnt/a b$c", /data]}
          swarm: {labels: {gpu: A100-SXM4-80GB, com.example.rack: "r1 (east)"}, network: team_net.1}
        """)
    assert len(config.runner.hosts or ()) == 4
    assert config.runner.docker_config.docker_mounts == (("cache_1.x", "/cache"), ("/mnt/a b$c", "/data"))


def test_an_alias_is_a_copy() -> None:
    config = parse_config("script: {a: &x {n: 1}, b: *x}", ["script.a.n=2"])
    assert config.script == {"a": {"n": 2}, "b": {"n": 1}}


@pytest.mark.parametrize("number", ["1", "1.10", "010", "1e-4", "-3", "0x1F", "1_000"])
def test_numbers_are_text_where_a_program_reads_them(number: str) -> None:
    """They reach the program as they are written: YAML would read 010 as 8, and 1.10 as 1.1."""
    config = parse_config(f"runner: {{env: {{N: {number}, T: a}}, script_args: [--lr, {number}], nodes: 1}}")
    assert (config.runner.env, config.runner.script_args) == ({"N": number, "T": "a"}, ("--lr", number))
    overridden = parse_config(
        "runner: {script_args: [a]}", [f"runner.env.N={number}", f"runner.script_args[0]={number}", f"script.n={number}"]
    )
    assert (overridden.runner.env, overridden.runner.script_args) == ({"N": number}, (number,))
    assert not isinstance(overridden.script["n"], str)
    assert parse_config("{}", [f"runner.script_args=[{number}]", f"runner.env={{N: {number}}}"]).runner.env == {"N": number}


@pytest.mark.parametrize("value", ["true", "null", "[1]"])
def test_other_values_in_env_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"runner\.env\.N"):
        parse_config(f"runner: {{env: {{N: {value}}}}}")
