"""All config errors are reported at once, with key path, line, and the nearest known key."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.config.loader import load_config, parse_config
from swarmtrain.config.schema.data import DataConfig
from swarmtrain.errors import ConfigError, SwarmtrainError


def list_problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(textwrap.dedent(text), overrides)
    return [f"{problem}{f' | {problem.hint}' if problem.hint else ''}" for problem in caught.value.problems]


def test_all_errors_come_at_once_in_file_order() -> None:
    assert list_problems(
        """\
        runer: {}
        topology:
          micro_batchsize: 3
          global_batch_size: x
        trainer:
          seed: -1
        """
    ) == [
        "config runer (line 1): unknown key; did you mean runner?",
        "config topology.micro_batchsize (line 3): unknown key; did you mean micro_batch_size?",
        'config topology.global_batch_size (line 4): must be a valid integer, not "x"',
        "config trainer.seed (line 6): must be greater than or equal to 0, not -1",
    ]


def test_a_key_that_resembles_none_lists_the_known_keys() -> None:
    (problem,) = list_problems("data: {zzz: 1}")
    known = ", ".join(sorted(DataConfig.model_fields))
    assert known.startswith("allow_different_tokenizers, blended_dataset, ")
    assert problem == f"config data.zzz (line 1): unknown key | known keys: {known}"


def test_an_item_of_a_list_is_named_by_its_index() -> None:
    assert list_problems("training_groups:\n- group_name: a\n  wieght_decay: 1") == [
        "config training_groups.0.wieght_decay (line 3): unknown key; did you mean weight_decay?"
    ]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ("optimizer: {zero: true}", "powersgd does not support optimizer.zero, which shards the sums of gradients | remove one of the two"),
        (
            "transformer_architecture: {precision: float16}",
            "powersgd does not support loss scaling: when the scale changes, the error feedback has the wrong one | set "
            "gradient_compression to bf16, or transformer_architecture.precision to bfloat16 without optimizer.loss_scaler.enable",
        ),
    ],
)
def test_sums_of_gradients_that_powersgd_cannot_approximate(sections: str, reason: str) -> None:
    topology = "topology: {gradient_compression: powersgd, global_batch_size: 8, micro_batch_size: 8}"
    (problem,) = list_problems(f"{topology}\n{sections}")
    assert problem == f"config topology.gradient_compression (line 1): {reason}"


def test_a_run_that_saves_nothing_cannot_roll_back() -> None:
    (problem,) = list_problems("trainer: {non_finite: roll_back}")
    assert problem == (
        "config trainer.non_finite (line 1): cannot roll back without checkpoints: save_dir is null | set trainer.save_dir, such as "
        "runs/mine"
    )


def test_a_duplicate_key_is_refused() -> None:
    assert list_problems("trainer: {seed: 1}\ntrainer: {seed: 2}") == ["config trainer (line 2): appears twice | keep one of the two"]


def test_a_quoted_number_is_not_a_number_and_a_bare_word_is_not_a_string() -> None:
    assert list_problems('trainer: {seed: "1"}\nrunner: {env: {A: true}}') == [
        'config trainer.seed (line 1): must be a valid integer, not "1"',
        "config runner.env.A (line 2): must be a valid string, not true | quote it",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "config: is not valid YAML: did not find expected node content"),
        ("- 1", "config: must be a mapping of keys such as runner and trainer, not a list"),
        ("just words", "config: must be a mapping"),
        ("a: !!python/object/apply:os.system [true]", "config: is not valid YAML: could not determine a constructor for the tag"),
        ("a: &x [*x]", "config: is not valid YAML: nested too deeply"),
        ("a: " + "[" * 2000 + "]" * 2000, "config: is not valid YAML: nested too deeply"),
    ],
)
def test_an_invalid_config_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert re.sub(r" \(line \d+\)", "", str(caught.value.problems[0])).startswith(message)


def test_an_exponent_without_a_point_is_a_number() -> None:
    assert parse_config("learning_rate_scheduler: {learning_rate: 1e-4}").learning_rate_scheduler.learning_rate == 1e-4


def test_overrides_change_values_lists_and_missing_sections() -> None:
    config = parse_config(
        "training_groups: [{group_name: a}]",
        [
            "trainer.seed=7",
            "training_groups.0.weight_decay=0.5",
            "training_groups[0].group_name=b",
            "runner.env.NCCL_DEBUG=INFO",
            "data.data_prefixes=[x]",
        ],
    )
    assert config.trainer.seed == 7
    assert (config.training_groups[0].group_name, config.training_groups[0].weight_decay) == ("b", 0.5)
    assert config.runner.env == {"NCCL_DEBUG": "INFO"}


def test_overrides_are_reported_like_the_rest() -> None:
    assert list_problems("trainer: {seed: 1}", "nonsense", "trainer.seed.x=1", "trainer.sed=1", "training_groups.0.x=1") == [
        "config: override 'nonsense' is not of the form key.path=value | for example: -o trainer.train_iterations=100",
        "config trainer.seed.x: override cannot be applied: trainer.seed is 1, which has no keys",
        "config training_groups: must be a list, not a mapping",
        "config trainer.sed: unknown key; did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("topology", "problem"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 3}, "topology.global_batch_size: 10 is not a multiple of micro_batch_size 3"),
        ({"global_batch_size": 10}, "topology: set two of"),
        ({"micro_batch_size": 1, "gradient_accumulation_steps": 2}, "topology.gradient_accumulation_steps: needs data_parallel_size"),
        (
            {"pipe_parallel_size": 4, "global_batch_size": 6, "micro_batch_size": 2},
            "topology.global_batch_size: 3 micro batches per step are fewer than pipe_parallel_size 4",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_stages_per_rank": 2, "global_batch_size": 6, "micro_batch_size": 2},
            "topology.global_batch_size: 3 micro batches per step are not a multiple of pipe_parallel_size 2",
        ),
        (
            {"pipe_stages_per_rank": 2, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_stages_per_rank: 2 requires pipe_parallel_size > 1",
        ),
        (
            {"pipe_parallel_size": 5, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_parallel_size: 5 stages exceed transformer_architecture.num_layers 4",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_stages_per_rank": 3, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_parallel_size: 2 x 3 = 6 stages exceed transformer_architecture.num_layers 4",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_partition_overwrite": [0], "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_partition_overwrite: names 1 first layer, but there are 2 stages",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_partition_overwrite": [1, 2], "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_partition_overwrite: begins with layer 1: the first stage must start with layer 0",
        ),
        (
            {"pipe_parallel_size": 3, "pipe_partition_overwrite": [0, 2, 2], "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_partition_overwrite: [0, 2, 2] is not increasing: each stage must start after the previous one",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_partition_overwrite": [0, 4], "global_batch_size": 8, "micro_batch_size": 1},
            "topology.pipe_partition_overwrite: starts a stage with layer 4: the last layer of 4 is 3",
        ),
        (
            {"activation_checkpointing_type": "every_pipe_stage", "global_batch_size": 8, "micro_batch_size": 1},
            "topology.activation_checkpointing_type: every_pipe_stage requires pipe_parallel_size > 1",
        ),
        (
            {"context_parallel_size": 4, "world_size": 6, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.world_size: 6 is not a multiple of model_parallel_size x pipe_parallel_size x context_parallel_size = 4",
        ),
        (
            {"cpu_offload": True, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.cpu_offload: requires fsdp or hsdp, but data_parallel_type is ddp",
        ),
        (
            {"reduce_every_micro_batch": True, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.reduce_every_micro_batch: requires fsdp or hsdp, but data_parallel_type is ddp",
        ),
        (
            {
                "reduce_every_micro_batch": True,
                "data_parallel_type": "fsdp",
                "pipe_parallel_size": 2,
                "global_batch_size": 8,
                "micro_batch_size": 1,
            },
            "topology.reduce_every_micro_batch: does not support pipeline parallelism, which reduces gradients once per step",
        ),
        (
            {"powersgd": {"start_step": 5}, "gradient_compression": "bf16", "global_batch_size": 8, "micro_batch_size": 1},
            "topology.powersgd: requires gradient_compression: powersgd, but it is bf16",
        ),
        (
            {"gradient_compression": "bf16", "data_parallel_type": "fsdp", "global_batch_size": 8, "micro_batch_size": 1},
            "topology.gradient_compression: bf16 requires ddp, but data_parallel_type is fsdp | set data_parallel_type to ddp, or",
        ),
        (
            {"world_size": 6, "pipe_parallel_size": 4, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.world_size: 6 is not a multiple of model_parallel_size x pipe_parallel_size = 4",
        ),
        (
            {"world_size": 6, "model_parallel_size": 4, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.world_size: 6 is not a multiple of",
        ),
        (
            {"world_size": 6, "model_parallel_size": 2, "data_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.world_size: 6 is not model_parallel_size x pipe_parallel_size x data_parallel_size = 2 x 1 x 2",
        ),
        (
            {"data_parallel_size": 2, "global_batch_size": 9, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
            "topology.global_batch_size: 9 is not micro_batch_size x",
        ),
        ({"data_parallel_type": "hsdp", "global_batch_size": 8, "micro_batch_size": 1}, "topology.data_parallel_type: hsdp needs"),
        (
            {"data_parallel_shard_size": 2, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.data_parallel_shard_size: requires hsdp",
        ),
        (
            {
                "data_parallel_type": "hsdp",
                "data_parallel_shard_size": 2,
                "data_parallel_size": 3,
                "global_batch_size": 8,
                "micro_batch_size": 1,
            },
            "topology.data_parallel_size: 3 is not a multiple of data_parallel_shard_size 2",
        ),
        (
            {"micro_batch_assignment": "by_speed", "data_parallel_type": "fsdp", "global_batch_size": 8, "micro_batch_size": 1},
            "topology.micro_batch_assignment: by_speed requires ddp: with fsdp, all ranks of a shard group take part in each micro batch",
        ),
        (
            {"micro_batch_assignment": "by_speed", "pipe_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1},
            "topology.micro_batch_assignment: by_speed does not support pipeline parallelism",
        ),
        (
            {"micro_batch_assignment": "by_speed", "data_parallel_size": 4, "global_batch_size": 14, "micro_batch_size": 2},
            "topology.micro_batch_assignment: by_speed requires 2 micro batches per replica, but 4 replicas have 7 | reduce "
            "micro_batch_size, or set global_batch_size to 16 or more",
        ),
        (
            {"micro_batch_assignment": "by_speed", "global_batch_size": 6, "micro_batch_size": 2},
            "topology.micro_batch_assignment: by_speed requires 2 micro batches per replica, but 2 replicas have 3",
        ),
    ],
)
def test_sizes_that_do_not_fit(topology: dict[str, Any], problem: str) -> None:
    found = list_problems(json.dumps({"topology": topology}))
    assert len(found) == 1
    assert found[0].replace(" (line 1)", "").startswith(f"config {problem}")


def test_sharded_optimizer_state_excludes_an_assignment_by_speed() -> None:
    topology = {"micro_batch_assignment": "by_speed", "global_batch_size": 8, "micro_batch_size": 1}
    (problem,) = list_problems(json.dumps({"topology": topology, "optimizer": {"zero": True}}))
    assert "topology.micro_batch_assignment" in problem
    assert "by_speed does not support optimizer.zero" in problem


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"hidden_size": 120}, "hidden_size: 120 is not a multiple of the float8 alignment 16 | 112 or 128 would fit"),
        (
            {"hidden_size": 48},
            "hidden_size: 48 is not a multiple of the float8 alignment 16 x topology.model_parallel_size = 32 | 32 or 64 would fit",
        ),
        (
            {"mlp_factor": 1.1},
            "mlp_factor: gives a width of 140, which is not a multiple of the float8 alignment 16 | leave fp8_config_mlp out, or",
        ),
        (
            {"fp8_config_attention": {}, "hidden_size": 96, "attention_num_kv_heads": 1},
            "attention_num_kv_heads: gives a width of 24, which is not a multiple of the float8 alignment 16",
        ),
        ({"sequence_length": 24}, "sequence_length: 24 is not a multiple of the float8 alignment 16 | 16 or 32 would fit"),
        (
            {"precision": "float16"},
            "precision: float16 does not support float8 matmuls, which fp8_config_mlp enables | set precision: bfloat16",
        ),
        ({"fp8_config_mlp": {"scaling": "rowwise"}}, "fp8_config_mlp.scaling: rowwise scaling supports only bfloat16 | set precision to b"),
        (
            {"fp8_config_mlp": {"dtypes_forward": {"left_dtype": "e5m2", "right_dtype": "e5m2"}}},
            "fp8_config_mlp.dtypes_forward.right_dtype: no device can multiply two e5m2 matrices | choose e4m3 for one operand",
        ),
        ({"fp8_config_mlp": None, "fp8_emulate": True}, "fp8_emulate: has an effect only on float8 matmuls, but no fp8_config_… is set"),
    ],
)
def test_shapes_that_float8_does_not_take(shape: dict[str, Any], problem: str) -> None:
    tensor = 2 if "topology" in problem else 1
    topology = {"global_batch_size": 2, "micro_batch_size": 2, "model_parallel_size": tensor}
    found = list_problems(json.dumps({"topology": topology, "transformer_architecture": {"fp8_config_mlp": {}, **shape}}))
    assert len(found) == 1
    assert found[0].replace(" (line 1)", "").startswith(f"config transformer_architecture.{problem}")


@pytest.mark.parametrize(
    ("runner", "problem"),
    [
        ("{hosts: [a, a]}", "runner.hosts: names a more than once"),
        ("{hosts: [a], nodes: 2}", "runner.nodes: 2, but hosts lists only 1"),
        ("{hosts: ['a slots=0,2'], swarm: {gpu: none}}", "runner.hosts: 'a slots=0,2' lists GPUs, but swarm.gpu is none"),
        (
            "{hosts: ['a slots=0,2'], swarm: {gpu: reserve}}",
            "runner.hosts: 'a slots=0,2' lists GPUs, but swarm.gpu is reserve",
        ),
        ("{hosts: ['a slots=2,2']}", "runner.hosts.0: 2 is listed more than once"),
        ("{swarm: {gpu_ids: [0, x], gpu: visible}}", "runner.swarm.gpu_ids: 'x' is not a GPU"),
        ("{swarm: {gpu_ids: [0], gpu: none}}", "runner.swarm.gpu_ids: have an effect only with gpu: visible, but gpu is none"),
        ("{hosts: [a slots=2], swarm: {gpu_ids: [0], gpu: visible}}", "runner.hosts: 'a slots=2' has more slots than the 1 GPUs"),
        (
            "{default_gpu_count: 2, swarm: {gpu_ids: [0], gpu: visible}}",
            "runner.default_gpu_count: 2 slots, but swarm.gpu_ids",
        ),
        ("{hosts: ['a slots=x']}", "runner.hosts.0: 'a slots=x' is not a valid host"),
        ("{hosts: ['.']}", "runner.hosts.0: '.' is not a valid host"),
        ("{hosts: ['.. slots=2']}", "runner.hosts.0: '.. slots=2' is not a valid host"),
        ("{hosts: ['a address=..']}", "runner.hosts.0: 'a address=..' is not a valid host"),
        ("{hosts: ['a address=-/-']}", "runner.hosts.0: 'a address=-/-' is not a valid host"),
        ("{hosts: ['-oProxyCommand=x']}", "runner.hosts.0: '-oProxyCommand=x' is not a valid host"),
        ("{hosts: ['-Fevil.conf']}", "runner.hosts.0: -Fevil.conf: a host name cannot begin with '-'"),
        ("{hosts: ['a address=-l']}", "runner.hosts.0: -l: a host name cannot begin with '-'"),
        ("{master_addr: -v, swarm: {network: host}}", "runner.master_addr: -v: a host name cannot begin with '-'"),
        ("{hosts: ['a address=a-ib']}", "runner.hosts: address= requires swarm.network: host"),
        ("{hosts: ['a address=a-ib', b], swarm: {network: host}}", "runner.hosts: 'b' has no address=, but other hosts do"),
        (
            "{hosts: ['a address=a-ib'], interface: ib0, swarm: {network: host}}",
            "runner.interface: conflicts with the addresses in hosts",
        ),
        ("{nodes: 2, min_nodes: 3}", "runner.min_nodes: min_nodes <= nodes <= max_nodes is violated: 3 <= 2 <= 2"),
        ("{nodes: 5, max_nodes: 3}", "runner.max_nodes: min_nodes <= nodes <= max_nodes is violated: 5 <= 5 <= 3"),
        ("{docker_config: {docker_mounts: [./x, /y]}}", "runner.docker_config.docker_mounts: ./x: a mount's source"),
        ("{docker_config: {docker_mounts: [/x, /y, /z]}}", "runner.docker_config.docker_mounts: a flat list must have an even length"),
        ("{docker_config: {volumes: {data: {}}}}", "runner.docker_config.volumes: data is not mounted anywhere"),
        ("{docker_config: {volumes: {data: {size: 3}}}}", "runner.docker_config.volumes.data.size: "),
        (
            "{docker_config: {volumes: {data: {kind: nfs}}}}",
            "runner.docker_config.volumes: data: kind: Docker's local driver supports only",
        ),
        ("{docker_config: {volumes: {data: {type: nfs}}}}", "runner.docker_config.volumes: data: NFS needs the server in o"),
        ("{docker_config: {cache_dir: cache}}", "runner.docker_config.cache_dir: cache: must be an absolute path in the container"),
        ("{docker_config: {user: me}}", "runner.docker_config.user: 'me' is not a numeric user"),
        ("{docker_config: {memory: 3 apples}}", "runner.docker_config.memory: must be a number of bytes"),
        ("{env: {SWARMTRAIN_RUN: x}}", "runner.env: SWARMTRAIN_RUN: names that begin with SWARMTRAIN_ are reserved"),
        ("{env: {a-b: x}}", "runner.env: 'a-b' is not a valid variable name"),
        (f"{{env: {{LONG: {'x' * 131_067}}}}}", "runner.env: LONG: has 131,072 bytes, but the kernel starts no process with"),
        (f"{{script_args: [short, {'x' * 131_072}]}}", "runner.script_args: argument 2: has 131,072 bytes, but the kernel starts no"),
        ("{swarm: {network: bridge}}", "runner.swarm.network: bridge: use the name of an overlay network, or host"),
        ("{swarm: {network: host, internal: true}}", "runner.swarm.network: mtu, subnet, encrypted and internal apply only to a network"),
        ("{swarm: {network: shared, subnet: 10.20.0.0/24}}", "runner.swarm.network: mtu, subnet, encrypted and internal apply only to"),
        ("{swarm: {subnet: 10.20.0.0/40}}", "runner.swarm.subnet: '10.20.0.0/40' is not an IPv4 subnet: write it like 10.20.0.0/24"),
        ("{swarm: {subnet: 'fd00::/64'}}", "runner.swarm.subnet: 'fd00::/64' is not an IPv4 subnet"),
        ("{swarm: {subnet: 10.20.0.7/24}}", "runner.swarm.subnet: '10.20.0.7/24' contains an address of a machine, not of a subnet"),
        ("{swarm: {subnet: 10.20.0.0}}", "runner.swarm.subnet: '10.20.0.0' has no prefix length"),
        ("{swarm: {subnet: 8.8.8.0/24}}", "runner.swarm.subnet: 8.8.8.0/24 is not private: use a part of 10.0.0.0/8"),
        ("{swarm: {subnet: 0.0.0.0/0}}", "runner.swarm.subnet: 0.0.0.0/0 is not private"),
        (
            "{swarm: {subnet: 10.20.0.0/28}, max_nodes: 7}",
            "runner.swarm.subnet: 10.20.0.0/28 has 16 addresses, but a run of up to 7 nodes needs 19",
        ),
        ("{master_addr: gpu-1}", "runner.master_addr: requires swarm.network: host"),
        ("{interface: 10.1.0.0/40}", "runner.interface: '10.1.0.0/40' is not a subnet"),
        ("{interface: two words}", "runner.interface: 'two words' is not a network interface"),
        ("{numa: near}", "runner.numa: must be 'node', 'socket', 'exclusive' or 'core-complex'"),
        ("{nccl: {socket_nthreads: 16, nsocks_perthread: 16}}", "runner.nccl.nsocks_perthread: socket_nthreads x nsocks_perthread is 256"),
        ("{nccl: {net_gdr_level: FAR}}", "runner.nccl.net_gdr_level: "),
        (
            "{runner_type: kubernetes}",
            "runner.runner_type: must be 'swarm', 'docker', 'local', 'ssh', 'ssh_docker' or 'slurm', not \"kubernetes\"",
        ),
    ],
)
def test_runners_that_do_not_fit(runner: str, problem: str) -> None:
    found = list_problems(f"runner: {runner}")
    assert len(found) == 1
    assert found[0].replace(" (line 1)", "").startswith(f"config {problem}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "big.yml").write_bytes(b" " * 2_000_000)
    (tmp_path / "binary.yml").write_bytes(b"\xff\x00")
    for name, words in {"none.yml": "no such file", "big.yml": "is 2.0 MB", "binary.yml": "is not text", ".": "is a folder"}.items():
        with pytest.raises(SwarmtrainError, match=words):
            load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        (
            "objective_config: {gamma: 2.0}",
            "has no _target_ | set it to the dotted path of a class, such as my_module.FocalLoss",
        ),
        (
            "objective_config: {_target_: my_module.FocalLoss}, contrastive_config: {}",
            "contrastive_config is set, too: a run has one objective | remove one of the two",
        ),
    ],
)
def test_a_custom_objective_is_a_class_and_the_only_objective(trainer: str, problem: str) -> None:
    assert list_problems(f"trainer: {{{trainer}}}") == [f"config trainer.objective_config (line 1): {problem}"]
