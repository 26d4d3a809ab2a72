"""Configs that are wrong: what `plan` answers. All problems of a config come at once, in the order of its lines."""

from __future__ import annotations

from error_cases import ErrorCase

CHAPTER = "The config"


def test_unknown_key(error_case: ErrorCase) -> None:
    """Unknown key

    The section does not have this key. The error names the most similar key; if no key is similar, it lists all keys.
    """
    error_case.write_config("""\
        runer: {nodes: 2}
        data: {files: [x]}
        """)
    error_case("swarmtrain plan config.yml")


def test_wrong_type(error_case: ErrorCase) -> None:
    """Wrong type

    The value does not have the type that its key requires. Nothing is converted silently: a quoted number is a string, and a bare `true` is
    not.
    """
    error_case.write_config("""\
        runner:
          nodes: two
          env: {NCCL_DEBUG: true}
          hosts: gpu-1
        trainer:
          seed: "42"
          train_iterations: 1.5
        topology: 8
        """)
    error_case("swarmtrain plan config.yml")


def test_several_mistakes(error_case: ErrorCase) -> None:
    """Several errors

    All errors are reported at once, in the order of the file.
    """
    error_case.write_config("""\
        topology: {global_batch_size: 10, micro_batch_size: 3}
        trainer:
          save_intervall: 100
          seed: -1
        transformer_architecture: {hidden_size: 100, num_attention_heads: 3}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_invalid_fine_tuning(error_case: ErrorCase) -> None:
    """Invalid fine-tuning settings

    Only a part of the model is trained, and the rest would not be saved anywhere, or the part does not exist.
    """
    error_case.write_config("""\
        trainer:
          save_frozen_parameters: false
        transformer_architecture:
          adapter_config: {attention_downsampling_factor: null, mlp_downsampling_factor: null}
        """)
    error_case("swarmtrain plan config.yml")
    error_case.write_config("trainer: {finetunable_token_ids: [3, 300]}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_invalid_preference_pairs(error_case: ErrorCase) -> None:
    """Invalid preference tuning (DPO) settings

    Preference tuning needs rejected responses, an adapter to train, and complete responses on each rank.
    """
    error_case.write_config("trainer: {preference_config: {}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        trainer: {preference_config: {}}
        data: {data_prefixes: [a], rejected_prefixes: [b]}
        """)
    error_case("swarmtrain plan config.yml")
    error_case.write_config("data: {data_prefixes: [a], rejected_prefixes: [b, c]}")
    error_case("swarmtrain plan config.yml")


def test_invalid_contrastive_texts(error_case: ErrorCase) -> None:
    """Invalid contrastive training settings

    Contrastive training needs answers to queries, an embedding head, and complete texts on each rank.
    """
    error_case.write_config("trainer: {contrastive_config: {}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        trainer: {contrastive_config: {}}
        data: {data_prefixes: [a], positive_prefixes: [b]}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("data: {data_prefixes: [a], positive_prefixes: [b], rejected_prefixes: [c]}")
    error_case("swarmtrain plan config.yml")


def test_samples_of_a_pipeline(error_case: ErrorCase) -> None:
    """Sampling with pipeline parallelism

    Sampling during training requires all layers and full sequences on each rank.
    """
    error_case.write_config("""\
        topology: {pipe_parallel_size: 2, global_batch_size: 8, micro_batch_size: 4}
        trainer:
          sampling_config: {prompts: [once]}
        """)
    error_case("swarmtrain plan config.yml")


def test_out_of_range(error_case: ErrorCase) -> None:
    """Value out of range

    The key does not accept this number or word.
    """
    error_case.write_config("""\
        runner: {runner_type: kubernetes, master_port: 80000, stop_grace: .inf, docker_config: {memory: lots}}
        optimizer: {beta1: 1.0}
        learning_rate_scheduler: {learning_rate: 1.0e-4, learning_rate_minimum: 1.0e-3}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_training(error_case: ErrorCase) -> None:
    """Conflicting training settings

    The setting belongs to one schedule or one precision, and another one would silently ignore it.
    """
    error_case.write_config("learning_rate_scheduler: {learning_rate_decay_style: cosine, learning_rate_decay_steps: 100}")
    error_case("swarmtrain plan config.yml")
    error_case.write_config("optimizer: {state_precision: bfloat16, beta2: 0.999}")
    error_case("swarmtrain plan config.yml")
    error_case.write_config("optimizer: {loss_scaler: {min_scale: 2, initial_scale: 1, factor: 1}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_batch_sizes(error_case: ErrorCase) -> None:
    """Batch sizes do not divide

    Any two of the three batch sizes determine the third. The given sizes must be consistent.
    """
    for topology in (
        "{global_batch_size: 10, micro_batch_size: 3}",
        "{global_batch_size: 10}",
        "{micro_batch_size: 2, gradient_accumulation_steps: 4}",
        "{global_batch_size: 10, gradient_accumulation_steps: 4, data_parallel_size: 1}",
        "{global_batch_size: 16, micro_batch_size: 3, gradient_accumulation_steps: 2, data_parallel_size: 2}",
    ):
        error_case.write_config(f"topology: {topology}")
        error_case("swarmtrain plan config.yml", expect_hint=False)


def test_parallel_sizes(error_case: ErrorCase) -> None:
    """Parallel sizes do not match

    The world must consist of complete replicas, and the model must be evenly divisible among the ranks.
    """
    for topology in (
        "{world_size: 6, model_parallel_size: 4, global_batch_size: 8, micro_batch_size: 1}",
        "{world_size: 6, model_parallel_size: 2, data_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}",
        "{model_parallel_size: 3, global_batch_size: 8, micro_batch_size: 1}",
        "{data_parallel_type: hsdp, global_batch_size: 8, micro_batch_size: 1}",
        "{cpu_offload: true, global_batch_size: 8, micro_batch_size: 1}",
    ):
        error_case.write_config(f"topology: {topology}")
        error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        topology: {context_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {sequence_length: 254}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        topology: {model_parallel_size: 2, sequence_parallel: true, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {sequence_length: 255}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_shapes(error_case: ErrorCase) -> None:
    """Inconsistent model architecture

    Shared key heads, rotary positions and local attention windows must be consistent with each other, and with the number of ranks that
    divide the heads.
    """
    for shape in (
        "{num_attention_heads: 8, attention_num_kv_heads: 2, num_local_attention_heads: 6, local_attention_window_size: 64}",
        "{num_local_attention_heads: 2}",
        "{local_attention_window_size: 64}",
        "{num_local_attention_heads: 8, local_attention_window_size: 64}",
        "{local_attention_layers: [true, false]}",
        "{num_local_attention_heads: 4, local_attention_window_size: 64, local_attention_layers: [false]}",
        "{num_local_attention_heads: 4, local_attention_window_size: 64, local_attention_layers: []}",
        "{rotary_percentage: 0.3}",
        "{norm_type: rms, layernorm: {layernorm_bias: true}}",
        "{umup: {enable: true}}",
        "{weight_tying: false, umup: {enable: true}}",
        "{weight_tying: false, umup: {enable: true}, attention_softcap: 50}",
    ):
        error_case.write_config(f"transformer_architecture: {shape}")
        error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        topology: {model_parallel_size: 4, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {num_attention_heads: 8, attention_num_kv_heads: 2}
        """)
    error_case("swarmtrain plan config.yml")


def test_pipeline(error_case: ErrorCase) -> None:
    """Invalid pipeline settings

    Each pipeline stage needs at least one layer. Each rank needs work: a step has at least as many micro batches as the pipeline has ranks.
    """
    for topology in (
        "{pipe_parallel_size: 2, pipe_stages_per_rank: 3, global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 2, pipe_partition_overwrite: [0, 1, 3], global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 4, global_batch_size: 8, micro_batch_size: 4}",
        "{pipe_parallel_size: 2, pipe_stages_per_rank: 2, global_batch_size: 3, micro_batch_size: 1}",
        "{activation_checkpointing_type: every_pipe_stage, global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 2, data_parallel_type: fsdp, reduce_every_micro_batch: true, global_batch_size: 8, micro_batch_size: 1}",
    ):
        error_case.write_config(f"topology: {topology}")
        error_case("swarmtrain plan config.yml")


def test_gradient_compression(error_case: ErrorCase) -> None:
    """Gradients that cannot be compressed

    Only replicas of `ddp` sum gradients in a way that can be [compressed](../explanation/parallelism.md#gradient-compression).
    """
    for topology in ("{gradient_compression: bf16, data_parallel_type: fsdp, ", "{powersgd: {start_step: 100}, "):
        error_case.write_config(f"topology: {topology}global_batch_size: 8, micro_batch_size: 1}}")
        error_case("swarmtrain plan config.yml")


def test_ranks_do_not_fit(error_case: ErrorCase) -> None:
    """Slots do not form complete replicas

    The config itself is valid, but the number of ranks that the hosts offer does not fit its topology.
    """
    error_case.write_config("""\
        runner: {hosts: [gpu-1 slots=2, gpu-2 slots=1]}
        topology: {model_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}
        """)
    error_case("swarmtrain generate config.yml")
    error_case.write_config("""\
        runner: {hosts: [gpu-1 slots=2, gpu-2 slots=1]}
        topology: {world_size: 4, global_batch_size: 8, micro_batch_size: 1}
        """)
    error_case("swarmtrain generate config.yml")


def test_duplicate_hosts(error_case: ErrorCase) -> None:
    """Duplicate host

    Each node runs one service. A node with several GPUs has several slots.
    """
    error_case.write_config("runner: {hosts: [gpu-1, gpu-2, gpu-1]}")
    error_case("swarmtrain plan config.yml")


def test_few_hosts(error_case: ErrorCase) -> None:
    """More nodes than hosts

    `nodes` is larger than the number of hosts in `hosts`, or the range of nodes is invalid.
    """
    error_case.write_config("runner: {hosts: [gpu-1, gpu-2], nodes: 3}")
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("runner: {nodes: 4, min_nodes: 5, max_nodes: 8}")
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("runner: {hosts: []}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_hosts(error_case: ErrorCase) -> None:
    """Invalid host

    Each part of a host name has at most 63 characters. The number of slots must be an integer.
    """
    error_case.write_config(f"runner: {{hosts: ['gpu-1 slots=many', 'gpu-2 slots=0', gpu 3, {'g' * 64}]}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_gpus(error_case: ErrorCase) -> None:
    """GPUs cannot be selected

    Hosts can name GPUs if `swarm.gpu` is `visible`. If it is `reserve`, Swarm chooses the GPUs.
    """
    error_case.write_config("runner: {hosts: ['gpu-1 slots=0,2'], swarm: {gpu: reserve}}")
    error_case("swarmtrain plan config.yml")
    error_case.write_config("runner: {hosts: [gpu-1 slots=4], swarm: {gpu: visible, gpu_ids: [0, 2]}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_network_settings(error_case: ErrorCase) -> None:
    """Conflicting network settings

    Some settings apply to an overlay network that the stack creates, others to the machines' own network.
    """
    error_case.write_config("runner: {swarm: {network: host, mtu: 9000}, interface: 10.1.0.0/99}")
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("runner: {master_addr: gpu-1, nccl: {debug: LOUD}}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_bad_volumes(error_case: ErrorCase) -> None:
    """Invalid volume

    A node creates the volume when a container needs it, with the options of Docker's local volume driver.
    """
    error_case.write_config(
        "runner: {docker_config: {docker_mounts: [[runs, /runs]], volumes: {runs: {type: nfs, device: 'nas:/export'}}}}"
    )
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("runner: {docker_config: {volumes: {runs: {}}}}")
    error_case("swarmtrain plan config.yml")


def test_bad_names(error_case: ErrorCase) -> None:
    """Invalid Docker name

    Images, volumes, networks and labels each have naming rules. swarmtrain checks them before the deploy, so that no engine refuses a name
    in the middle of it.
    """
    error_case.write_config("""\
        runner:
          docker_config:
            docker_container: Registry/My Image
            docker_mounts: [[./data, /data]]
          swarm:
            network: bridge
            labels: {gpu: "{{new}}"}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        runner: {docker_config: {docker_mounts: [["{{.Node.Hostname}}", /data]]}}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        runner: {docker_config: {docker_mounts: [[/data, /data], [/mnt/data, /data]]}}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_variables(error_case: ErrorCase) -> None:
    """Invalid environment variable or secret

    Names must be valid shell variable names. Names that begin with `SWARMTRAIN_` are reserved for swarmtrain. A value cannot contain a NUL
    character.
    """
    error_case.write_config("""\
        runner:
          env: {A-B: x}
          secrets: {SWARMTRAIN_KEY: key.txt}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("""\
        runner: {env: {A: "x\\0y"}}
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_twice(error_case: ErrorCase) -> None:
    """Duplicate key

    YAML would silently keep the last of the two values.
    """
    error_case.write_config("""\
        trainer: {seed: 1}
        trainer: {train_iterations: 10}
        """)
    error_case("swarmtrain plan config.yml")


def test_not_yaml(error_case: ErrorCase) -> None:
    """Invalid YAML

    The file has a tab, an unclosed bracket or quote, or a value that YAML reads as something else.
    """
    for text in (
        "runner:\n\tnodes: 2",
        "runner: {nodes: 2\ntrainer: {seed: 1}",
        'runner: {script: "train.py}',
        "runner: {script: train.py: fast}",
        "runner: {script: *.py}",
        "runner: {nodes: 2}\n---\ntrainer: {seed: 1}",
        "just words",
        "script: {when: !!int noon}",
    ):
        error_case.write_config(text)
        error_case("swarmtrain plan config.yml", expect_hint=False)


def test_too_much(error_case: ErrorCase) -> None:
    """YAML alias bomb

    A few lines of aliases would expand to millions of values, or nest without end.
    """
    error_case.write_config("""\
        script:
          a: &a [x, x, x, x, x, x, x, x, x, x]
          b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]
          c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]
          d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]
          e: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]
        """)
    error_case("swarmtrain plan config.yml", expect_hint=False)
    error_case.write_config("script: &all {again: *all}")
    error_case("swarmtrain plan config.yml", expect_hint=False)


def test_empty(error_case: ErrorCase) -> None:
    """Empty config file

    The file has no content, or only comments. To use all defaults, write `{}` explicitly.
    """
    error_case.run_setup(": > config.yml")
    error_case("swarmtrain plan config.yml")
    error_case.write_config("# runner: {nodes: 2}")
    error_case("swarmtrain plan config.yml")


def test_not_text(error_case: ErrorCase) -> None:
    """Config is not a text file

    The file is binary, encoded as UTF-16, or contains NUL bytes.
    """
    error_case.run_setup("head -c 500 /dev/urandom > config.yml")
    error_case("swarmtrain plan config.yml")
    error_case.run_setup("printf 'runner: {nodes: 2}' | iconv -t UTF-16 > config.yml")
    error_case("swarmtrain plan config.yml")
    error_case.run_setup(r"printf 'runner: {nodes: 2}\0' > config.yml")
    error_case("swarmtrain plan config.yml")


def test_large(error_case: ErrorCase) -> None:
    """Config file is too large

    A config has at most 1 MB. A larger file is not read.
    """
    error_case.run_setup("truncate -s 100M config.yml")
    error_case("swarmtrain plan config.yml")


def test_no_file(error_case: ErrorCase) -> None:
    """Config file is missing

    The config does not exist, or is not a regular file. A file without an end is not read.
    """
    error_case("swarmtrain plan config.yml")
    error_case.run_setup("mkdir configs")
    error_case("swarmtrain plan configs")
    error_case("swarmtrain plan /dev/zero")
    error_case.run_setup("mkfifo pipe")
    error_case("swarmtrain plan pipe")


def test_unreadable(error_case: ErrorCase) -> None:
    """Config file is not readable

    The file's mode does not allow the user to read it.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.run_setup("chmod 000 config.yml")
    error_case("swarmtrain plan config.yml", as_nobody=True)
