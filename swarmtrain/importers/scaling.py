"""A config of Aleph Alpha's Scaling. Most fields have the same names and meanings here; the others are named below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarmtrain.config.training_groups import TrainingGroupConfig
from swarmtrain.importers import deepspeed
from swarmtrain.importers.book import Book, Key, Why, is_secret, kinds, known

SECTIONS = frozenset(("runner", "topology", "trainer", "training_groups", "transformer_architecture", "luminous_architecture"))
_MODEL = "own models are scripts of your own"
_LOADER = "batches are prepared in the background"
_KERNEL = "torch chooses attention's kernel"
_NOTHING, _OTHERWISE = Why.nothing, Why.otherwise
_LEFT: dict[str, tuple[Why, str]] = {
    "version": (_OTHERWISE, "checkpoints say which version wrote them"),
    "determined_experiment_id": (_NOTHING, ""),
    "determined_trial_id": (_NOTHING, ""),
    "runner.use_determined": (_NOTHING, ""),
    "runner.docker_config.docker_sudo": (_OTHERWISE, "DOCKER_HOST, or be in the group docker"),
    "logger.metrics_ranks": (_OTHERWISE, "metrics.jsonl has those of all ranks"),
    "logger.wandb_ranks": (_OTHERWISE, "rank 0 reports for all"),
    "logger.tensorboard_ranks": (_OTHERWISE, "rank 0 writes for all"),
    "logger.determined_metrics_ranks": (_NOTHING, ""),
    "topology.global_rank": (_OTHERWISE, "ranks are dealt when a world forms"),
    "topology.local_slot": (_OTHERWISE, "ranks are dealt when a world forms"),
    "optimizer.allreduce_bucket_size": (_OTHERWISE, "gradients are exchanged during the backward pass"),
    "optimizer.zero_save_static": (_OTHERWISE, "every checkpoint is written in parts, and fits any topology"),
    "optimizer.debug_log": (_NOTHING, ""),
    "training.use_deterministic_torch_algorithms": (_OTHERWISE, "trainer.deterministic"),
    "training.allow_missing_params_in_optimizer": (_NOTHING, "every parameter is in a group"),
    "training.loss_function_config": (_OTHERWISE, "cross entropy, or trainer.contrastive_config with data.positive_prefixes"),
    "transformer_architecture.embedding_head_config": (_OTHERWISE, "the same, with trainer.contrastive_config"),
    "trainer.assert_checkpoint_loaded": (_OTHERWISE, "load_dir must have a checkpoint; save_dir is gone on with where it has one"),
    "trainer.delete_past_optimizer_states": (_OTHERWISE, "trainer.keep_checkpoints"),
    "trainer.dataloader_num_workers": (_OTHERWISE, _LOADER),
    "trainer.dataloader_pin_memory": (_OTHERWISE, _LOADER),
    "trainer.dataloader_prefetch_factor": (_OTHERWISE, _LOADER),
    "trainer.separate_file_for_parameters": (_OTHERWISE, "trainer.save_frozen_parameters: false"),
    "trainer.merge_lora_after_loading_checkpoint": (_OTHERWISE, "swarmtrain export merges it"),
    "transformer_architecture.vocab_file": (_OTHERWISE, "data hold tokens already; vocab_size says how many there are"),
    "transformer_architecture.attention_qkv_in_one": (_OTHERWISE, "always in one product"),
    "transformer_architecture.attention_use_matmul": (_OTHERWISE, _KERNEL),
    "transformer_architecture.masked_softmax": (_OTHERWISE, _KERNEL),
    "transformer_architecture.layernorm.optimization_type": (_OTHERWISE, "trainer.compile"),
    "transformer_architecture.lm_head": (_NOTHING, _MODEL),
    "transformer_architecture.lora_config.name": (_NOTHING, ""),
    "transformer_architecture.adapter_config.name": (_NOTHING, ""),
    "transformer_architecture.adapter_config.init_std": (_OTHERWISE, "it begins as if it were not there"),
    "transformer_architecture.softprompt_config": (
        _OTHERWISE,
        "trainer.finetunable_token_ids, of tokens that the tokenizer keeps in reserve",
    ),
    "transformer_architecture.bitfit_bias_config": (_OTHERWISE, "trainer.finetunable_parameters: [bias]"),
    "transformer_architecture.causal": (_NOTHING, "always causal"),
    "transformer_architecture.umup.allow_non_umup_params": (_NOTHING, ""),
    "data.finetuning_dataset": (_OTHERWISE, "swarmtrain data prepare --prompt-key"),
    "data.finetuning_chat_dataset": (_OTHERWISE, "swarmtrain data prepare --chat"),
    "data.legacy_dataset": (_NOTHING, "write the tokens anew"),
    "data.load_mmap_index_to_memory": (_OTHERWISE, "data.use_mmap"),
    "data.load_data_item_mmap_index_to_memory": (_OTHERWISE, "data.use_mmap"),
    "data.only_full_sequences": (_OTHERWISE, "data.packing"),
    "data.allow_incomplete_sequences_every_n": (_OTHERWISE, "data.packing"),
    "data.blended_dataset.cache_directory": (_OTHERWISE, "nothing is cached: the order is a function of the step"),
    "data.blended_dataset.shuffle_dataset_indices": (_OTHERWISE, "samples are always shuffled"),
    "data.blended_dataset.load_dataset_indices_to_memory": (_OTHERWISE, "nothing is cached: the order is a function of the step"),
    "data.blended_dataset.minimum_dataset_size": (_NOTHING, ""),
}
# What Scaling does where a config is silent, and swarmtrain does not.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "transformer_architecture": {
        "sequence_length": 2048,
        "attention_bias": True,
        "mlp_bias": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
    },
    "trainer": {"save_interval": None, "eval_iterations": 1},
}


def read(book: Book, hosts: tuple[str, ...] = ()) -> None:
    """Carry a Scaling config, of a run on `hosts` if they are named beside it."""
    book.rename((), "luminous_architecture", "transformer_architecture")
    book.rename(("runner",), "hostfile", "hostsfile")
    if hosts and book.has("runner.hostsfile"):
        book.leave("runner.hostsfile", Why.otherwise, "runner.hosts has those of --hostsfile")
    if book.get("logger.use_tensorboard") and not (book.get("logger.log_dir") or book.get("trainer.save_dir")):
        book.leave("logger.use_tensorboard", Why.otherwise, "logger.log_dir says where to; without it Scaling writes nothing either")
    _place(book, hosts)
    for key, value in list(book.leaves()):
        path = ".".join(key)
        around = (".".join(key[:length]) for length in range(1, len(key) + 1))
        left = next((_LEFT[name] for name in around if name in _LEFT), None)
        if key[0] == "training_groups" or book.spoken(key) or (book.carried(key) is not None and key not in _SPOKEN):
            continue
        if key in _SPOKEN:
            _SPOKEN[key](book, key)
        elif is_secret(key[-1]) and value is not None:
            book.leave(key, Why.otherwise, "runner.secrets: {WANDB_API_KEY: FILE}")
        elif left is not None and not known(path):
            book.leave(key, Why.default if value in (None, False) else left[0], left[1])
        elif not known(path):
            book.leave(key, Why.default if value is None else Why.nothing, "" if value is None else _near(path))
        elif value is None and type(None) not in kinds(path) and key[-1] not in ("load_dir", "save_interval"):
            book.leave(key, Why.default, path)
        elif isinstance(value, float) and value.is_integer() and int in kinds(path):
            book.carry(key, path, int(value))
        else:
            book.carry(key, path)
    _batch(book, hosts or tuple(map(str, book.items("runner.hosts"))))
    _groups(book)
    _fill(book)


def _place(book: Book, named: tuple[str, ...]) -> None:
    kind, key = book.get("runner.runner_type", "pdsh"), "runner.runner_type"
    hosts = named or book.items("runner.hosts")
    alone = not hosts and not book.get("runner.hostsfile")
    if "runner" not in book.source or not isinstance(book.get("runner"), dict):
        return
    if kind not in ("pdsh", "pdsh_docker"):
        book.leave(key, Why.nothing, "runner.runner_type")
    else:
        placed = book.place("local" if alone and kind == "pdsh" else kind, key if book.has(key) else ())
        if alone and kind == "pdsh":
            book.note("without hosts Scaling runs on the machine itself: runner.runner_type is local")
            if type(book.get("topology.world_size")) is int:
                book.put("runner.default_gpu_count", book.get("topology.world_size"))
        if placed.startswith("pdsh"):
            book.note("Scaling passes on the variables in ~/.deepspeed_env, if there is one; here runner.env_file names it")
        book.show_gpus()
        if placed == "swarm":
            book.note("Scaling shows all GPUs to its processes: runner.swarm.gpu is visible")
    if not isinstance(book.get("runner.default_gpu_count"), int) and hosts and not all("slots=" in str(host) for host in hosts):
        book.put("runner.default_gpu_count", 8)
        book.note("a host that names no slots has 8 in Scaling: runner.default_gpu_count is 8")


def _hostsfile(book: Book, key: Key) -> None:
    if book.get(key) is None:
        book.leave(key, Why.default, "runner.hosts")
    elif known(key):
        book.carry(key, key)
    else:
        book.leave(key, Why.otherwise, "--hostsfile FILE puts it into runner.hosts")


def _gpus(book: Book, key: Key) -> None:
    """Without hosts Scaling does not ask for it, but for the machine's own GPUs."""
    if book.carried(key) is not None:
        book.leave(key, Why.otherwise, "without hosts: topology.world_size")
    elif book.get(key) is None or (book.carried("runner.runner_type") == "local"):
        book.leave(key, Why.default, "the machine's GPUs")
    else:
        book.carry(key, key)


def _master(book: Book, key: Key) -> None:
    if book.get(key) is None or not str(book.carried("runner.runner_type")).startswith("pdsh"):
        book.leave(key, Why.default if book.get(key) is None else Why.otherwise, "the notice board is found by itself")
    else:
        book.carry(key, key)


def _window(book: Book, key: Key) -> None:
    if book.get("transformer_architecture.num_local_attention_heads"):
        book.carry(key, key)
    else:
        book.leave(key, Why.default, "there are no local heads")


def _weights(book: Book, key: Key) -> None:
    """Scaling lets the number of documents win over weights, unless that is switched off."""
    if book.get("data.blended_dataset.weight_by_num_documents", True) and book.get(key) is not None:
        book.leave(key, Why.otherwise, "Scaling lets weight_by_num_documents win; for weights set that to false")
    else:
        book.carry(key, key)


def _weight_decay(book: Book, key: Key) -> None:
    if book.items("training_groups"):
        book.leave(key, Why.otherwise, "training_groups have their own")
        return
    book.carry(key, "training_groups", [{"group_name": "all", "weight_decay": book.get(key)}])
    book.note("training_groups: weight decay is of all parameters, biases and norms too; to leave some out give them a group of their own")


def _deterministic(book: Book, key: Key) -> None:
    book.carry(key, "trainer.deterministic", "require" if book.get(key) else "ignore")


def _statistics(book: Book, key: Key) -> None:
    """All but the entropy, which is that of probabilities: no module returns any."""
    pairs = book.items(key)
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list) for pair in pairs):
        book.carry(key, key)
        return
    if any("entropy" in wanted for _, wanted in pairs):
        book.note("tensor statistics have no entropy: attention's probabilities are never there as a whole")
    book.carry(key, key, [[glob, [one for one in wanted if one != "entropy"]] for glob, wanted in pairs])


def _lora(book: Book, key: Key) -> None:
    """Attention's output is called dense there."""
    book.carry(key, (*key[:-1], "layers"), ["output" if name == "dense" else name for name in book.items(key)])


def _tokens(book: Book, key: Key) -> None:
    if book.items(key):
        book.carry(key, "trainer.finetunable_token_ids")
    else:
        book.leave(key, Why.default, "trainer.finetunable_token_ids")


_SPOKEN = {
    ("runner", "hostsfile"): _hostsfile,
    ("runner", "default_gpu_count"): _gpus,
    ("runner", "master_addr"): _master,
    ("runner", "runner_type"): lambda book, key: None,
    ("transformer_architecture", "local_attention_window_size"): _window,
    ("transformer_architecture", "lora_config", "parallel_modules"): _lora,
    ("transformer_architecture", "finetunable_token_ids"): _tokens,
    ("data", "blended_dataset", "weights"): _weights,
    ("training", "weight_decay"): _weight_decay,
    ("optimizer", "weight_decay"): _weight_decay,
    ("trainer", "tensor_statistics_recorder_config", "statistics"): _statistics,
    ("training", "use_deterministic_torch_algorithms"): _deterministic,
}


def _batch(book: Book, hosts: tuple[str, ...]) -> None:
    """Scaling knows the ranks when it multiplies; a config may not say them."""
    names = ("micro_batch_size", "gradient_accumulation_steps", "model_parallel_size", "pipe_parallel_size")
    micro, steps, tensor, pipeline = (book.get(f"topology.{name}") for name in names)
    said = any(book.get(f"topology.{name}") for name in ("world_size", "data_parallel_size", "global_batch_size"))
    if said or type(micro) is not int or type(steps) is not int:
        return
    replica = (tensor if type(tensor) is int else 1) * (pipeline if type(pipeline) is int else 1)
    replicas = max(1, (deepspeed.ranks(hosts) or 1) // max(1, replica))
    book.drop("topology.gradient_accumulation_steps")
    book.leave("topology.gradient_accumulation_steps", Why.otherwise, "follows from topology.global_batch_size")
    book.put("topology.global_batch_size", micro * steps * replicas)
    book.note(f"topology.global_batch_size is {micro} x {steps} x {replicas}, the replicas that its hosts make: set it if there are others")


def _groups(book: Book) -> None:
    groups, made = book.get("training_groups"), []
    if not isinstance(groups, list):
        return
    for index, group in enumerate(groups):
        kept: dict[str, Any] = {}
        for name, value in group.items() if isinstance(group, dict) else ():
            key = ("training_groups", str(index), name)
            if name in TrainingGroupConfig.model_fields:
                kept |= {} if value is None else {name: value}
            else:
                book.leave(key, Why.nothing)
        made.append(kept)
    book.carry("training_groups", "training_groups", made)
    if any(group.get("parameters_include") or group.get("parameters_exclude") for group in made):
        book.note(
            "training_groups: expressions are searched in swarmtrain's names of parameters; a run tells them where one matches nothing"
        )
    if any(group.get("independent_weight_decay") for group in made):
        book.note("training_groups: independent_weight_decay follows the schedule here, though not the height of its learning_rate")


def _fill(book: Book) -> None:
    """Write out what Scaling does where the config is silent."""
    written = {path: value for path, value in _silent(book) if not book.has(path)}
    for path, value in written.items():
        book.put(path, value)
    if written:
        book.note(f"Scaling's defaults that are others here are written out: {', '.join(written)}")


def _silent(book: Book) -> Iterator[tuple[str, Any]]:
    """Yield Scaling's defaults in the sections that the config has."""
    for section, defaults in _DEFAULTS.items():
        if isinstance(book.get(section), dict):
            yield from ((f"{section}.{name}", value) for name, value in defaults.items())
    shape = "transformer_architecture"
    if isinstance(book.get(shape), dict) and book.get(f"{shape}.norm_type", "layernorm") == "layernorm":
        yield f"{shape}.layernorm.layernorm_bias", True
    blended = "data.blended_dataset."
    if len(book.items("data.data_prefixes")) > 1 and not book.get(f"{blended}weight_examples_proportional"):
        yield f"{blended}weight_by_num_documents", True
    if book.get(f"{shape}.precision") == "float16":
        yield from (("optimizer.loss_scaler.enable", False), ("optimizer.loss_scaler.initial_scale", 2.0**32))
    if book.get("logger.use_wandb"):
        yield from (("logger.wandb_team", "aleph-alpha"), ("logger.wandb_project", "aleph-alpha-scaling"), ("logger.wandb_group", "debug"))


def _near(path: str) -> str:
    return (
        _MODEL
        if path.startswith("transformer_architecture.")
        else "a Dataset in datautils.py"
        if path.startswith("data.")
        else "unknown to swarmtrain"
    )
