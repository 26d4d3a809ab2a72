"""Import a config of Aleph Alpha's Scaling. Most fields have the same names and meanings; this module maps the fields that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarmtrain.config.schema.runner_types import RUNNER_TYPE_ALIASES
from swarmtrain.config.schema.training_groups import TrainingGroupConfig
from swarmtrain.importers import deepspeed
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, get_field_types, is_config_field, is_secret_name

SECTIONS = frozenset(("runner", "topology", "trainer", "training_groups", "transformer_architecture", "luminous_architecture"))
_CUSTOM_SCRIPT_TEXT = "write a custom script for a custom model"
_BACKGROUND_LOADING_TEXT = "batches are prepared in the background"
_ATTENTION_KERNEL_TEXT = "torch selects the attention kernel"
_NO_COUNTERPART, _DONE_DIFFERENTLY = UnmappedReason.no_counterpart, UnmappedReason.done_differently
_UNMAPPED_KEYS: dict[str, tuple[UnmappedReason, str]] = {
    "version": (_DONE_DIFFERENTLY, "checkpoints record the version that wrote them"),
    "determined_experiment_id": (_NO_COUNTERPART, ""),
    "determined_trial_id": (_NO_COUNTERPART, ""),
    "runner.use_determined": (_NO_COUNTERPART, ""),
    "runner.docker_config.docker_sudo": (_DONE_DIFFERENTLY, "set DOCKER_HOST, or add the user to the docker group"),
    "logger.metrics_ranks": (_DONE_DIFFERENTLY, "metrics.jsonl contains the metrics of all ranks"),
    "logger.wandb_ranks": (_DONE_DIFFERENTLY, "rank 0 reports the metrics of all ranks"),
    "logger.tensorboard_ranks": (_DONE_DIFFERENTLY, "rank 0 writes the metrics of all ranks"),
    "logger.determined_metrics_ranks": (_NO_COUNTERPART, ""),
    "topology.global_rank": (_DONE_DIFFERENTLY, "ranks are assigned when a world forms"),
    "topology.local_slot": (_DONE_DIFFERENTLY, "ranks are assigned when a world forms"),
    "optimizer.allreduce_bucket_size": (_DONE_DIFFERENTLY, "gradients are exchanged during the backward pass"),
    "optimizer.zero_save_static": (_DONE_DIFFERENTLY, "every checkpoint is sharded and can be loaded with any topology"),
    "optimizer.debug_log": (_NO_COUNTERPART, ""),
    "training.use_deterministic_torch_algorithms": (_DONE_DIFFERENTLY, "trainer.deterministic"),
    "training.allow_missing_params_in_optimizer": (_NO_COUNTERPART, "every parameter is in a group"),
    "training.loss_function_config": (_DONE_DIFFERENTLY, "cross entropy, or trainer.contrastive_config with data.positive_prefixes"),
    "transformer_architecture.embedding_head_config": (_DONE_DIFFERENTLY, "the same key, together with trainer.contrastive_config"),
    "trainer.assert_checkpoint_loaded": (
        _DONE_DIFFERENTLY,
        "load_dir must have a checkpoint; training resumes from save_dir if it has one",
    ),
    "trainer.delete_past_optimizer_states": (_DONE_DIFFERENTLY, "trainer.keep_checkpoints"),
    "trainer.dataloader_num_workers": (_DONE_DIFFERENTLY, _BACKGROUND_LOADING_TEXT),
    "trainer.dataloader_pin_memory": (_DONE_DIFFERENTLY, _BACKGROUND_LOADING_TEXT),
    "trainer.dataloader_prefetch_factor": (_DONE_DIFFERENTLY, _BACKGROUND_LOADING_TEXT),
    "trainer.separate_file_for_parameters": (_DONE_DIFFERENTLY, "trainer.save_frozen_parameters: false"),
    "trainer.merge_lora_after_loading_checkpoint": (_DONE_DIFFERENTLY, "swarmtrain export merges it"),
    "transformer_architecture.vocab_file": (_DONE_DIFFERENTLY, "data is already tokenized; set vocab_size to the size of the vocabulary"),
    "transformer_architecture.attention_qkv_in_one": (_DONE_DIFFERENTLY, "always computed in one matrix product"),
    "transformer_architecture.attention_use_matmul": (_DONE_DIFFERENTLY, _ATTENTION_KERNEL_TEXT),
    "transformer_architecture.masked_softmax": (_DONE_DIFFERENTLY, _ATTENTION_KERNEL_TEXT),
    "transformer_architecture.layernorm.optimization_type": (_DONE_DIFFERENTLY, "trainer.compile"),
    "transformer_architecture.lm_head": (_NO_COUNTERPART, _CUSTOM_SCRIPT_TEXT),
    "transformer_architecture.lora_config.name": (_NO_COUNTERPART, ""),
    "transformer_architecture.adapter_config.name": (_NO_COUNTERPART, ""),
    "transformer_architecture.adapter_config.init_std": (_DONE_DIFFERENTLY, "an adapter is initialized to have no effect"),
    "transformer_architecture.softprompt_config": (
        _DONE_DIFFERENTLY,
        "trainer.finetunable_token_ids, for reserved tokens of the tokenizer",
    ),
    "transformer_architecture.bitfit_bias_config": (_DONE_DIFFERENTLY, "trainer.finetunable_parameters: [bias]"),
    "transformer_architecture.causal": (_NO_COUNTERPART, "always causal"),
    "transformer_architecture.umup.allow_non_umup_params": (_NO_COUNTERPART, ""),
    "data.finetuning_dataset": (_DONE_DIFFERENTLY, "swarmtrain data tokenize --prompt-key"),
    "data.finetuning_chat_dataset": (_DONE_DIFFERENTLY, "swarmtrain data tokenize --chat"),
    "data.legacy_dataset": (_NO_COUNTERPART, "tokenize the data again"),
    "data.load_mmap_index_to_memory": (_DONE_DIFFERENTLY, "data.use_mmap"),
    "data.load_data_item_mmap_index_to_memory": (_DONE_DIFFERENTLY, "data.use_mmap"),
    "data.only_full_sequences": (_DONE_DIFFERENTLY, "data.packing"),
    "data.allow_incomplete_sequences_every_n": (_DONE_DIFFERENTLY, "data.packing"),
    "data.blended_dataset.cache_directory": (_DONE_DIFFERENTLY, "nothing is cached: the order is a function of the step"),
    "data.blended_dataset.shuffle_dataset_indices": (_DONE_DIFFERENTLY, "samples are always shuffled"),
    "data.blended_dataset.load_dataset_indices_to_memory": (_DONE_DIFFERENTLY, "nothing is cached: the order is a function of the step"),
    "data.blended_dataset.minimum_dataset_size": (_NO_COUNTERPART, ""),
}
FOREIGN_KEYS = frozenset((*_UNMAPPED_KEYS, "luminous_architecture"))
"""Keys of Scaling's configs that a swarmtrain config does not have."""
# Defaults of Scaling that differ from swarmtrain's.
_SCALING_DEFAULTS: dict[str, dict[str, Any]] = {
    "transformer_architecture": {
        "sequence_length": 2048,
        "attention_bias": True,
        "mlp_bias": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
    },
    "trainer": {"save_interval": None, "eval_iterations": 1},
}


def map_scaling_config(report: MigrationReport, hosts: tuple[str, ...] = ()) -> None:
    """Map the Scaling config in `report` for a run on `hosts`; if `hosts` is empty, on the hosts in the Scaling config."""
    report.rename_source_key((), "luminous_architecture", "transformer_architecture")
    report.rename_source_key(("runner",), "hostfile", "hostsfile")
    if hosts and report.has_source_key("runner.hostsfile"):
        report.add_unmapped_key("runner.hostsfile", UnmappedReason.done_differently, "runner.hosts lists the hosts of --hostsfile")
    if report.get_source_value("logger.use_tensorboard") and not (
        report.get_source_value("logger.log_dir") or report.get_source_value("trainer.save_dir")
    ):
        report.add_unmapped_key(
            "logger.use_tensorboard",
            UnmappedReason.done_differently,
            "set logger.log_dir; without it, Scaling writes nothing either",
        )
    _map_runner_type(report, hosts)
    for key, value in list(report.iterate_source_leaves()):
        path = ".".join(key)
        enclosing_paths = (".".join(key[:length]) for length in range(1, len(key) + 1))
        unmapped = next((_UNMAPPED_KEYS[name] for name in enclosing_paths if name in _UNMAPPED_KEYS), None)
        if (
            key[0] == "training_groups"
            or report.is_key_handled(key)
            or (report.get_config_value(key) is not None and key not in _KEY_HANDLERS)
        ):
            continue
        if key in _KEY_HANDLERS:
            _KEY_HANDLERS[key](report, key)
        elif is_secret_name(key[-1]) and value is not None:
            report.add_unmapped_key(key, UnmappedReason.done_differently, "runner.secrets: {WANDB_API_KEY: FILE}")
        elif unmapped is not None and not is_config_field(path):
            report.add_unmapped_key(key, UnmappedReason.is_default if value in (None, False) else unmapped[0], unmapped[1])
        elif not is_config_field(path):
            report.add_unmapped_key(
                key,
                UnmappedReason.is_default if value is None else UnmappedReason.no_counterpart,
                "" if value is None else _suggest_field_replacement(path),
            )
        elif value is None and type(None) not in get_field_types(path) and key[-1] not in ("load_dir", "save_interval"):
            report.add_unmapped_key(key, UnmappedReason.is_default, path)
        elif isinstance(value, float) and value.is_integer() and int in get_field_types(path):
            report.map_key(key, path, int(value))
        else:
            report.map_key(key, path)
    _map_batch_sizes(report, hosts or tuple(map(str, report.get_source_list("runner.hosts"))))
    _map_training_groups(report)
    _fill_scaling_defaults(report)


def _map_runner_type(report: MigrationReport, hosts_argument: tuple[str, ...]) -> None:
    source_type, key = report.get_source_value("runner.runner_type", "pdsh"), "runner.runner_type"
    hosts = hosts_argument or report.get_source_list("runner.hosts")
    is_single_machine = not hosts and not report.get_source_value("runner.hostsfile")
    if "runner" not in report.source or not isinstance(report.get_source_value("runner"), dict):
        return
    if not isinstance(source_type, str) or source_type not in RUNNER_TYPE_ALIASES:
        report.add_unmapped_key(key, UnmappedReason.no_counterpart, "runner.runner_type")
    else:
        runner_type = RUNNER_TYPE_ALIASES[source_type]
        uses_local = is_single_machine and runner_type == "ssh"
        report.set_runner_type("local" if uses_local else runner_type, key if report.has_source_key(key) else ())
        if uses_local:
            report.add_note("without hosts, Scaling runs on the local machine: runner.runner_type is local")
            if type(report.get_source_value("topology.world_size")) is int:
                report.set_config_value("runner.default_gpu_count", report.get_source_value("topology.world_size"))
        if not uses_local:
            report.add_note("Scaling passes on the variables in ~/.deepspeed_env if it exists; to use it, set runner.env_file")
        report.add_gpu_visibility_setting()
    if (
        not isinstance(report.get_source_value("runner.default_gpu_count"), int)
        and hosts
        and not all("slots=" in str(host) for host in hosts)
    ):
        report.set_config_value("runner.default_gpu_count", 8)
        report.add_note("Scaling gives a host without slots= 8 slots: runner.default_gpu_count is 8")


def _map_hostsfile(report: MigrationReport, key: KeyPath) -> None:
    if report.get_source_value(key) is None:
        report.add_unmapped_key(key, UnmappedReason.is_default, "runner.hosts")
    elif is_config_field(key):
        report.map_key(key, key)
    else:
        report.add_unmapped_key(key, UnmappedReason.done_differently, "use --hostsfile FILE, which fills runner.hosts")


def _map_gpu_count(report: MigrationReport, key: KeyPath) -> None:
    """Map default_gpu_count. Without hosts Scaling ignores it and uses the machine's own GPUs."""
    if report.get_config_value(key) is not None:
        report.add_unmapped_key(key, UnmappedReason.done_differently, "without hosts, topology.world_size applies")
    elif report.get_source_value(key) is None or (report.get_config_value("runner.runner_type") == "local"):
        report.add_unmapped_key(key, UnmappedReason.is_default, "the machine's GPUs")
    else:
        report.map_key(key, key)


def _map_master_address(report: MigrationReport, key: KeyPath) -> None:
    if report.get_source_value(key) is None or not str(report.get_config_value("runner.runner_type")).startswith("ssh"):
        report.add_unmapped_key(
            key,
            UnmappedReason.is_default if report.get_source_value(key) is None else UnmappedReason.done_differently,
            "the coordinator's address is detected automatically",
        )
    else:
        report.map_key(key, key)


def _map_local_attention_window(report: MigrationReport, key: KeyPath) -> None:
    if report.get_source_value("transformer_architecture.num_local_attention_heads"):
        report.map_key(key, key)
    else:
        report.add_unmapped_key(key, UnmappedReason.is_default, "num_local_attention_heads is 0 or unset")


def _map_blend_weights(report: MigrationReport, key: KeyPath) -> None:
    """Map blend weights. In Scaling weight_by_num_documents takes precedence over weights unless it is false."""
    if report.get_source_value("data.blended_dataset.weight_by_num_documents", True) and report.get_source_value(key) is not None:
        report.add_unmapped_key(
            key, UnmappedReason.done_differently, "in Scaling, weight_by_num_documents takes precedence; set it to false to use weights"
        )
    else:
        report.map_key(key, key)


def _map_weight_decay(report: MigrationReport, key: KeyPath) -> None:
    if report.get_source_list("training_groups"):
        report.add_unmapped_key(key, UnmappedReason.done_differently, "set for each group in training_groups")
        return
    report.map_key(key, "training_groups", [{"group_name": "all", "weight_decay": report.get_source_value(key)}])
    report.add_note(
        "training_groups: weight decay applies to all parameters, including biases and norms; to exclude some, give them a separate group"
    )


def _map_deterministic_mode(report: MigrationReport, key: KeyPath) -> None:
    report.map_key(key, "trainer.deterministic", "require" if report.get_source_value(key) else "ignore")


def _map_tensor_statistics(report: MigrationReport, key: KeyPath) -> None:
    """Map tensor statistics, except the entropy: it is defined for probabilities, but no module of the model outputs probabilities."""
    pairs = report.get_source_list(key)
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list) for pair in pairs):
        report.map_key(key, key)
        return
    if any("entropy" in statistics for _, statistics in pairs):
        report.add_note("tensor statistics have no entropy: attention probabilities are never materialized")
    report.map_key(key, key, [[glob, [statistic for statistic in statistics if statistic != "entropy"]] for glob, statistics in pairs])


def _map_lora_layers(report: MigrationReport, key: KeyPath) -> None:
    """Map the names of LoRA layers. Scaling calls the output projection of attention `dense`, swarmtrain calls it `output`."""
    report.map_key(key, (*key[:-1], "layers"), ["output" if name == "dense" else name for name in report.get_source_list(key)])


def _map_finetunable_tokens(report: MigrationReport, key: KeyPath) -> None:
    if report.get_source_list(key):
        report.map_key(key, "trainer.finetunable_token_ids")
    else:
        report.add_unmapped_key(key, UnmappedReason.is_default, "trainer.finetunable_token_ids")


_KEY_HANDLERS = {
    ("runner", "hostsfile"): _map_hostsfile,
    ("runner", "default_gpu_count"): _map_gpu_count,
    ("runner", "master_addr"): _map_master_address,
    ("runner", "runner_type"): lambda report, key: None,
    ("transformer_architecture", "local_attention_window_size"): _map_local_attention_window,
    ("transformer_architecture", "lora_config", "parallel_modules"): _map_lora_layers,
    ("transformer_architecture", "finetunable_token_ids"): _map_finetunable_tokens,
    ("data", "blended_dataset", "weights"): _map_blend_weights,
    ("training", "weight_decay"): _map_weight_decay,
    ("optimizer", "weight_decay"): _map_weight_decay,
    ("trainer", "tensor_statistics_recorder_config", "statistics"): _map_tensor_statistics,
    ("training", "use_deterministic_torch_algorithms"): _map_deterministic_mode,
}


def _map_batch_sizes(report: MigrationReport, hosts: tuple[str, ...]) -> None:
    """Set topology.global_batch_size, unless the source determines it: micro batch size x accumulation steps x replicas on `hosts`.

    Scaling derives it from the number of ranks, which a swarmtrain config need not contain.
    """
    names = ("micro_batch_size", "gradient_accumulation_steps", "model_parallel_size", "pipe_parallel_size")
    micro_batch_size, accumulation_steps, tensor_parallel_size, pipeline_parallel_size = (
        report.get_source_value(f"topology.{name}") for name in names
    )
    is_known = any(report.get_source_value(f"topology.{name}") for name in ("world_size", "data_parallel_size", "global_batch_size"))
    if is_known or type(micro_batch_size) is not int or type(accumulation_steps) is not int:
        return
    ranks_per_replica = (tensor_parallel_size if type(tensor_parallel_size) is int else 1) * (
        pipeline_parallel_size if type(pipeline_parallel_size) is int else 1
    )
    replicas = max(1, (deepspeed.count_slots(hosts) or 1) // max(1, ranks_per_replica))
    report.remove_config_value("topology.gradient_accumulation_steps")
    report.add_unmapped_key(
        "topology.gradient_accumulation_steps", UnmappedReason.done_differently, "follows from topology.global_batch_size"
    )
    report.set_config_value("topology.global_batch_size", micro_batch_size * accumulation_steps * replicas)
    report.add_note(
        f"topology.global_batch_size is {micro_batch_size} x {accumulation_steps} x {replicas}, the number of replicas on its hosts: "
        f"change "
        f"it if the number differs"
    )


def _map_training_groups(report: MigrationReport) -> None:
    groups, mapped_groups = report.get_source_value("training_groups"), []
    if not isinstance(groups, list):
        return
    for index, group in enumerate(groups):
        mapped_fields: dict[str, Any] = {}
        for name, value in group.items() if isinstance(group, dict) else ():
            key = ("training_groups", str(index), name)
            if name in TrainingGroupConfig.model_fields:
                mapped_fields |= {} if value is None else {name: value}
            else:
                report.add_unmapped_key(key, UnmappedReason.no_counterpart)
        mapped_groups.append(mapped_fields)
    report.map_key("training_groups", "training_groups", mapped_groups)
    if any(group.get("parameters_include") or group.get("parameters_exclude") for group in mapped_groups):
        report.add_note("training_groups: patterns match swarmtrain's parameter names; a run lists the names if a pattern matches none")
    if any(group.get("independent_weight_decay") for group in mapped_groups):
        report.add_note("training_groups: independent_weight_decay follows the schedule, but not the value of learning_rate")


def _fill_scaling_defaults(report: MigrationReport) -> None:
    """Set the config fields for which Scaling's default differs from swarmtrain's."""
    filled_values = {path: value for path, value in _iterate_scaling_defaults(report) if not report.has_source_key(path)}
    for path, value in filled_values.items():
        report.set_config_value(path, value)
    if filled_values:
        report.add_note(f"Scaling's defaults that differ from swarmtrain's are written out: {', '.join(filled_values)}")


def _iterate_scaling_defaults(report: MigrationReport) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each default of Scaling that differs from swarmtrain's, for the sections that the source has."""
    for section, defaults in _SCALING_DEFAULTS.items():
        if isinstance(report.get_source_value(section), dict):
            yield from ((f"{section}.{name}", value) for name, value in defaults.items())
    shape = "transformer_architecture"
    if isinstance(report.get_source_value(shape), dict) and report.get_source_value(f"{shape}.norm_type", "layernorm") == "layernorm":
        yield f"{shape}.layernorm.layernorm_bias", True
    blended = "data.blended_dataset."
    if len(report.get_source_list("data.data_prefixes")) > 1 and not report.get_source_value(f"{blended}weight_examples_proportional"):
        yield f"{blended}weight_by_num_documents", True
    if report.get_source_value(f"{shape}.precision") == "float16":
        yield from (("optimizer.loss_scaler.enable", False), ("optimizer.loss_scaler.initial_scale", 2.0**32))
    if report.get_source_value("logger.use_wandb"):
        yield from (("logger.wandb_team", "aleph-alpha"), ("logger.wandb_project", "aleph-alpha-scaling"), ("logger.wandb_group", "debug"))


def _suggest_field_replacement(field_path: str) -> str:
    return (
        _CUSTOM_SCRIPT_TEXT
        if field_path.startswith("transformer_architecture.")
        else "implement Dataset in datautils.py"
        if field_path.startswith("data.")
        else "unknown to swarmtrain"
    )
