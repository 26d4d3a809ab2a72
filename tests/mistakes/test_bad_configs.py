"""Configs that are wrong: what `plan` answers. All problems of a config come at once, in the order of its lines."""

from __future__ import annotations

from answers import Answer

CHAPTER = "The config"


def test_unknown_key(answer: Answer) -> None:
    """Unknown key

    A key that its section does not have. The nearest one is named; where none is near, all are.
    """
    answer.config("""\
        runer: {nodes: 2}
        data: {files: [x]}
        """)
    answer("swarmtrain plan config.yml")


def test_wrong_type(answer: Answer) -> None:
    """Wrong type

    A value of another kind than its key wants. Nothing is converted silently: a quoted number is text, and a bare `true` is none.
    """
    answer.config("""\
        runner:
          nodes: two
          env: {NCCL_DEBUG: true}
          hosts: gpu-1
        trainer:
          seed: "42"
          train_iterations: 1.5
        topology: 8
        """)
    answer("swarmtrain plan config.yml")


def test_several_mistakes(answer: Answer) -> None:
    """Several mistakes

    All of them are told at once, in the order of the file.
    """
    answer.config("""\
        topology: {global_batch_size: 10, micro_batch_size: 3}
        trainer:
          save_intervall: 100
          seed: -1
        transformer_architecture: {hidden_size: 100, num_attention_heads: 3}
        """)
    answer("swarmtrain plan config.yml", hint=False)


def test_tuning_that_does_not_fit(answer: Answer) -> None:
    """Tuning that does not fit

    A part of a model is tuned, and the rest, or the part, is nowhere.
    """
    answer.config("""\
        trainer:
          save_frozen_parameters: false
        transformer_architecture:
          adapter_config: {attention_downsampling_factor: null, mlp_downsampling_factor: null}
        """)
    answer("swarmtrain plan config.yml")
    answer.config("trainer: {finetunable_token_ids: [3, 300]}")
    answer("swarmtrain plan config.yml", hint=False)


def test_pairs_that_are_none(answer: Answer) -> None:
    """Pairs that are none

    Learning from pairs needs the answers that lose, something to tune beside a model, and whole answers on each rank.
    """
    answer.config("trainer: {preference_config: {}}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        trainer: {preference_config: {}}
        data: {data_prefixes: [a], rejected_prefixes: [b]}
        """)
    answer("swarmtrain plan config.yml")
    answer.config("data: {data_prefixes: [a], rejected_prefixes: [b, c]}")
    answer("swarmtrain plan config.yml")


def test_texts_that_do_not_belong_together(answer: Answer) -> None:
    """Texts that do not belong together

    Learning which texts do takes answers to queries, a head that makes vectors, and whole texts on each rank.
    """
    answer.config("trainer: {contrastive_config: {}}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        trainer: {contrastive_config: {}}
        data: {data_prefixes: [a], positive_prefixes: [b]}
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("data: {data_prefixes: [a], positive_prefixes: [b], rejected_prefixes: [c]}")
    answer("swarmtrain plan config.yml")


def test_samples_of_a_pipeline(answer: Answer) -> None:
    """Samples of a pipeline

    A model can speak while it is trained where each rank has all layers and whole sequences.
    """
    answer.config("""\
        topology: {pipe_parallel_size: 2, global_batch_size: 8, micro_batch_size: 4}
        trainer:
          sampling_config: {prompts: [once]}
        """)
    answer("swarmtrain plan config.yml")


def test_out_of_range(answer: Answer) -> None:
    """Value out of range

    A number or a word that its key does not take.
    """
    answer.config("""\
        runner: {runner_type: kubernetes, master_port: 80000, stop_grace: .inf, docker_config: {memory: lots}}
        optimizer: {beta1: 1.0}
        learning_rate_scheduler: {learning_rate: 1.0e-4, learning_rate_minimum: 1.0e-3}
        """)
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_training(answer: Answer) -> None:
    """Ways to train that do not fit together

    A setting of one schedule or one precision that another would pass over in silence.
    """
    answer.config("learning_rate_scheduler: {learning_rate_decay_style: cosine, learning_rate_decay_steps: 100}")
    answer("swarmtrain plan config.yml")
    answer.config("optimizer: {state_precision: bfloat16, beta2: 0.999}")
    answer("swarmtrain plan config.yml")
    answer.config("optimizer: {loss_scaler: {min_scale: 2, initial_scale: 1, factor: 1}}")
    answer("swarmtrain plan config.yml", hint=False)


def test_batch_sizes(answer: Answer) -> None:
    """Batch sizes that do not divide

    Any two of the three batch sizes give the third, and what is given must fit.
    """
    for topology in (
        "{global_batch_size: 10, micro_batch_size: 3}",
        "{global_batch_size: 10}",
        "{micro_batch_size: 2, gradient_accumulation_steps: 4}",
        "{global_batch_size: 10, gradient_accumulation_steps: 4, data_parallel_size: 1}",
        "{global_batch_size: 16, micro_batch_size: 3, gradient_accumulation_steps: 2, data_parallel_size: 2}",
    ):
        answer.config(f"topology: {topology}")
        answer("swarmtrain plan config.yml", hint=False)


def test_parallel_sizes(answer: Answer) -> None:
    """Parallel sizes that do not multiply

    The world is a whole number of replicas, and a model is divided evenly.
    """
    for topology in (
        "{world_size: 6, model_parallel_size: 4, global_batch_size: 8, micro_batch_size: 1}",
        "{world_size: 6, model_parallel_size: 2, data_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}",
        "{model_parallel_size: 3, global_batch_size: 8, micro_batch_size: 1}",
        "{data_parallel_type: hsdp, global_batch_size: 8, micro_batch_size: 1}",
        "{cpu_offload: true, global_batch_size: 8, micro_batch_size: 1}",
    ):
        answer.config(f"topology: {topology}")
        answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        topology: {context_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {sequence_length: 254}
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        topology: {model_parallel_size: 2, sequence_parallel: true, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {sequence_length: 255}
        """)
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_shapes(answer: Answer) -> None:
    """Shapes that no model has

    Heads share keys, rotate and look back in ways that must fit each other, and the ranks that divide them.
    """
    for shape in (
        "{num_attention_heads: 8, attention_num_kv_heads: 2, num_local_attention_heads: 6, local_attention_window_size: 64}",
        "{num_local_attention_heads: 2}",
        "{local_attention_window_size: 64}",
        "{num_local_attention_heads: 8, local_attention_window_size: 64}",
        "{rotary_percentage: 0.3}",
        "{norm_type: rms, layernorm: {layernorm_bias: true}}",
        "{umup: {enable: true}}",
        "{weight_tying: false, umup: {enable: true}}",
    ):
        answer.config(f"transformer_architecture: {shape}")
        answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        topology: {model_parallel_size: 4, global_batch_size: 8, micro_batch_size: 1}
        transformer_architecture: {num_attention_heads: 8, attention_num_kv_heads: 2}
        """)
    answer("swarmtrain plan config.yml")


def test_pipeline(answer: Answer) -> None:
    """A pipeline that cannot be

    Each stage has a layer at least, and each rank something to do: a step has as many micro batches as the pipeline has ranks.
    """
    for topology in (
        "{pipe_parallel_size: 2, pipe_stages_per_rank: 3, global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 2, pipe_partition_overwrite: [0, 1, 3], global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 4, global_batch_size: 8, micro_batch_size: 4}",
        "{pipe_parallel_size: 2, pipe_stages_per_rank: 2, global_batch_size: 3, micro_batch_size: 1}",
        "{activation_checkpointing_type: every_pipe_stage, global_batch_size: 8, micro_batch_size: 1}",
        "{pipe_parallel_size: 2, data_parallel_type: fsdp, reduce_every_micro_batch: true, global_batch_size: 8, micro_batch_size: 1}",
    ):
        answer.config(f"topology: {topology}")
        answer("swarmtrain plan config.yml")


def test_ranks_do_not_fit(answer: Answer) -> None:
    """Slots that make no whole replicas

    The config is sound in itself, but the ranks that the hosts offer do not fit its topology.
    """
    answer.config("""\
        runner: {hosts: [gpu-1 slots=2, gpu-2 slots=1]}
        topology: {model_parallel_size: 2, global_batch_size: 8, micro_batch_size: 1}
        """)
    answer("swarmtrain generate config.yml")
    answer.config("""\
        runner: {hosts: [gpu-1 slots=2, gpu-2 slots=1]}
        topology: {world_size: 4, global_batch_size: 8, micro_batch_size: 1}
        """)
    answer("swarmtrain generate config.yml")


def test_duplicate_hosts(answer: Answer) -> None:
    """A host twice

    One service runs on each node; a node with several GPUs has several slots.
    """
    answer.config("runner: {hosts: [gpu-1, gpu-2, gpu-1]}")
    answer("swarmtrain plan config.yml")


def test_few_hosts(answer: Answer) -> None:
    """Fewer hosts than nodes

    `nodes` asks for more than `hosts` lists, or the range of nodes is none.
    """
    answer.config("runner: {hosts: [gpu-1, gpu-2], nodes: 3}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("runner: {nodes: 4, min_nodes: 5, max_nodes: 8}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("runner: {hosts: []}")
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_hosts(answer: Answer) -> None:
    """A host that is none

    A part of a host name has at most 63 characters; slots are a number.
    """
    answer.config(f"runner: {{hosts: ['gpu-1 slots=many', 'gpu-2 slots=0', gpu 3, {'g' * 64}]}}")
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_gpus(answer: Answer) -> None:
    """GPUs that cannot be had

    Hosts name GPUs where they are shown; where Swarm gives them out, it chooses.
    """
    answer.config("runner: {hosts: ['gpu-1 slots=0,2'], swarm: {gpu: reserve}}")
    answer("swarmtrain plan config.yml")
    answer.config("runner: {hosts: [gpu-1 slots=4], swarm: {gpu: visible, gpu_ids: [0, 2]}}")
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_network_settings(answer: Answer) -> None:
    """A network that cannot be so

    Some settings are of an overlay that the stack makes, others of the machines' own network.
    """
    answer.config("runner: {swarm: {network: host, mtu: 9000}, interface: 10.1.0.0/99}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("runner: {master_addr: gpu-1, nccl: {debug: LOUD}}")
    answer("swarmtrain plan config.yml", hint=False)


def test_bad_volumes(answer: Answer) -> None:
    """A volume that cannot be made

    A node makes it when a container needs it, with the options of Docker's local driver.
    """
    answer.config("runner: {docker_config: {docker_mounts: [[runs, /runs]], volumes: {runs: {type: nfs, device: 'nas:/export'}}}}")
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("runner: {docker_config: {volumes: {runs: {}}}}")
    answer("swarmtrain plan config.yml")


def test_bad_names(answer: Answer) -> None:
    """Names that Docker does not take

    Images, volumes, networks and labels have names with rules of their own. They are checked here, before an engine refuses one in the
    middle of a deploy.
    """
    answer.config("""\
        runner:
          docker_config:
            docker_container: Registry/My Image
            docker_mounts: [[./data, /data]]
          swarm:
            network: bridge
            labels: {gpu: "{{new}}"}
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        runner: {docker_config: {docker_mounts: [["{{.Node.Hostname}}", /data]]}}
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        runner: {docker_config: {docker_mounts: [[/data, /data], [/mnt/data, /data]]}}
        """)
    answer("swarmtrain plan config.yml", hint=False)


def test_variables(answer: Answer) -> None:
    """Environment variables and secrets

    Names are those a shell takes; those that begin with SWARMTRAIN_ are swarmtrain's own; no value can hold a NUL.
    """
    answer.config("""\
        runner:
          env: {A-B: x}
          secrets: {SWARMTRAIN_KEY: key.txt}
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("""\
        runner: {env: {A: "x\\0y"}}
        """)
    answer("swarmtrain plan config.yml", hint=False)


def test_twice(answer: Answer) -> None:
    """A key twice

    YAML would silently keep the last of the two.
    """
    answer.config("""\
        trainer: {seed: 1}
        trainer: {train_iterations: 10}
        """)
    answer("swarmtrain plan config.yml")


def test_not_yaml(answer: Answer) -> None:
    """YAML that is not YAML

    A tab, something that is not closed, a value that YAML reads as something else.
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
        answer.config(text)
        answer("swarmtrain plan config.yml", hint=False)


def test_too_much(answer: Answer) -> None:
    """YAML that explodes

    A few lines of aliases that would make millions of values, or nest without end.
    """
    answer.config("""\
        script:
          a: &a [x, x, x, x, x, x, x, x, x, x]
          b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]
          c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]
          d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]
          e: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]
        """)
    answer("swarmtrain plan config.yml", hint=False)
    answer.config("script: &all {again: *all}")
    answer("swarmtrain plan config.yml", hint=False)


def test_empty(answer: Answer) -> None:
    """An empty file

    Nothing in it, or comments alone. All defaults are `{}`, said aloud.
    """
    answer.situation(": > config.yml")
    answer("swarmtrain plan config.yml")
    answer.config("# runner: {nodes: 2}")
    answer("swarmtrain plan config.yml")


def test_not_text(answer: Answer) -> None:
    """A file that is not text

    Binary, UTF-16, or with NUL bytes in it.
    """
    answer.situation("head -c 500 /dev/urandom > config.yml")
    answer("swarmtrain plan config.yml")
    answer.situation("printf 'runner: {nodes: 2}' | iconv -t UTF-16 > config.yml")
    answer("swarmtrain plan config.yml")
    answer.situation(r"printf 'runner: {nodes: 2}\0' > config.yml")
    answer("swarmtrain plan config.yml")


def test_large(answer: Answer) -> None:
    """A file of 100 MB

    A config is at most 1 MB; what is larger is not read.
    """
    answer.situation("truncate -s 100M config.yml")
    answer("swarmtrain plan config.yml")


def test_no_file(answer: Answer) -> None:
    """No file

    The config is not there, or is something else than a file. What has no end is not read.
    """
    answer("swarmtrain plan config.yml")
    answer.situation("mkdir configs")
    answer("swarmtrain plan configs")
    answer("swarmtrain plan /dev/zero")
    answer.situation("mkfifo pipe")
    answer("swarmtrain plan pipe")


def test_unreadable(answer: Answer) -> None:
    """A config that may not be read

    Its mode keeps the user from reading it.
    """
    answer.config("runner: {nodes: 2}")
    answer.situation("chmod 000 config.yml")
    answer("swarmtrain plan config.yml", nobody=True)
