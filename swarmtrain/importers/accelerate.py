"""Import a config of Hugging Face accelerate.

Scripts that use `Accelerator` read the environment variables that `accelerate launch` sets. The import puts these variables into
runner.env, so that such a script runs unchanged. It also sets the equivalent config keys of swarmtrain's own trainer, where they exist.
"""

from __future__ import annotations

from typing import Any

from swarmtrain.importers import deepspeed
from swarmtrain.importers.launch_command import RENDEZVOUS_TEXT
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason

KEYS = frozenset(("compute_environment", "distributed_type", "num_processes", "num_machines"))
_PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHARDING_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
# Variables whose names cannot be derived from their keys in the accelerate config.
_FSDP_VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
    "fsdp_cpu_offload": "FSDP_OFFLOAD_PARAMS",
}
_DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_UNMAPPED_KEYS: dict[str, tuple[UnmappedReason, str]] = {
    "compute_environment": (UnmappedReason.done_differently, "runner.runner_type"),
    "machine_rank": (UnmappedReason.done_differently, RENDEZVOUS_TEXT),
    "main_process_ip": (UnmappedReason.done_differently, RENDEZVOUS_TEXT),
    "rdzv_backend": (UnmappedReason.done_differently, RENDEZVOUS_TEXT),
    "same_network": (UnmappedReason.done_differently, RENDEZVOUS_TEXT),
    "main_training_function": (UnmappedReason.done_differently, "runner.script is run as a script"),
    "downcast_bf16": (UnmappedReason.no_counterpart, "TPUs only"),
    "commands": (UnmappedReason.no_counterpart, ""),
    "command_file": (UnmappedReason.no_counterpart, ""),
}


def map_accelerate_config(report: MigrationReport, hosts: tuple[str, ...] = ()) -> None:
    """Map the accelerate config in `report` to config fields, for a run on `hosts` (empty if the hosts are unknown)."""
    distributed_type = str(report.get_source_value("distributed_type", "NO"))
    _map_machines(report, distributed_type, hosts)
    _map_environment(report)
    if distributed_type == "FSDP" or (report.get_source_mapping("fsdp_config") and distributed_type != "DEEPSPEED"):
        _map_fsdp(report)
    if distributed_type == "DEEPSPEED" or report.get_source_mapping("deepspeed_config"):
        _map_deepspeed(report)
    if report.get_source_mapping("megatron_lm_config"):
        _map_megatron(report)
    if report.get_source_mapping("parallelism_config"):
        _map_parallelism(report)
    for name, value in report.source.items():
        if name in _UNMAPPED_KEYS:
            report.add_unmapped_key(name, *_UNMAPPED_KEYS[name])
        elif name.startswith("tpu_") or (value in ({}, [], None) and not name.startswith("main_process")):
            report.add_unmapped_key(
                name, UnmappedReason.no_counterpart if value else UnmappedReason.is_default, "TPUs only" if name.startswith("tpu_") else ""
            )
    report.add_note(
        "runner.env has the variables that `accelerate launch` sets, so a script with an Accelerator runs as before; set runner.script "
        "and script_args"
    )
    report.add_note("topology and transformer_architecture apply only to swarmtrain's own trainer")


def _map_machines(report: MigrationReport, distributed_type: str, hosts: tuple[str, ...]) -> None:
    nodes, ranks = report.get_source_value("num_machines", 1), report.get_source_value("num_processes")
    is_multi_node = isinstance(nodes, int) and nodes > 1
    report.set_runner_type("swarm" if is_multi_node else "local")
    if distributed_type in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"):
        report.add_unmapped_key(
            "distributed_type",
            UnmappedReason.done_differently,
            "every run is distributed; whether it uses CPUs or GPUs depends on the nodes",
        )
    elif report.has_source_key("distributed_type"):
        report.add_unmapped_key("distributed_type", UnmappedReason.no_counterpart, "only NVIDIA GPUs and CPUs are supported")
    if hosts:
        deepspeed.map_hosts(report, hosts, ("hostsfile",))
        report.add_unmapped_key("num_machines", UnmappedReason.done_differently, "set by the hosts in the hostfile")
        report.add_unmapped_key("num_processes", UnmappedReason.done_differently, "set by the slots in the hostfile")
    else:
        if report.has_source_key("num_machines"):
            report.map_key("num_machines", "runner.nodes")
        if isinstance(ranks, int) and isinstance(nodes, int) and nodes > 0 and ranks % nodes == 0:
            report.map_key("num_processes", "runner.default_gpu_count", ranks // nodes)
            if is_multi_node:
                report.add_note(
                    f"num_processes is the total number of ranks on all machines: {ranks} on {nodes} machines, {ranks // nodes} on each"
                )
        elif report.has_source_key("num_processes"):
            report.add_unmapped_key(
                "num_processes",
                UnmappedReason.no_counterpart,
                "list the hosts with their slots: runner.hosts: [gpu-1 slots=4, gpu-2 slots=3]",
            )
    if isinstance(report.get_source_value("main_process_port"), int) and report.get_source_value("main_process_port"):
        report.map_key("main_process_port", "runner.master_port")
    elif report.has_source_key("main_process_port"):
        report.add_unmapped_key("main_process_port", UnmappedReason.is_default, "runner.master_port")
    _map_gpus(report, is_multi_node=is_multi_node, uses_cpu=bool(report.get_source_value("use_cpu")) or distributed_type == "MULTI_CPU")


def _map_gpus(report: MigrationReport, *, is_multi_node: bool, uses_cpu: bool) -> None:
    ids = report.get_source_value("gpu_ids")
    if is_multi_node and not uses_cpu:
        report.add_gpu_visibility_setting()
    if ids in (None, "all"):
        if report.has_source_key("gpu_ids"):
            report.add_unmapped_key("gpu_ids", UnmappedReason.is_default, "all GPUs of a host")
    elif is_multi_node:
        report.map_key("gpu_ids", "runner.swarm.gpu_ids", str(ids).replace(" ", "").split(","))
    else:
        report.map_key("gpu_ids", ("runner", "env", "CUDA_VISIBLE_DEVICES"), str(ids))


def _map_environment(report: MigrationReport) -> None:
    precision = report.get_source_value("mixed_precision")
    precision = "no" if precision is False else precision
    if precision is not None:
        _map_key_to_env_variable(report, ("mixed_precision",), "ACCELERATE_MIXED_PRECISION", str(precision))
        if str(precision) in _PRECISIONS:
            report.set_config_value("transformer_architecture.precision", _PRECISIONS[str(precision)])
        else:
            report.add_note("float8 is configured per layer type: see transformer_architecture.fp8_config_mlp and similar keys")
    for name, variable, variable_value in (
        ("use_cpu", "ACCELERATE_USE_CPU", "true"),
        ("debug", "ACCELERATE_DEBUG_MODE", "true"),
        ("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY", "1"),
    ):
        if report.get_source_value(name):
            _map_key_to_env_variable(report, (name,), variable, variable_value)
        elif report.has_source_key(name):
            report.add_unmapped_key(name, UnmappedReason.is_default)
    if report.get_source_value("num_cpu_threads_per_process"):
        _map_key_to_env_variable(
            report, ("num_cpu_threads_per_process",), "OMP_NUM_THREADS", report.get_source_value("num_cpu_threads_per_process")
        )
    for name, value in report.get_source_mapping("dynamo_config").items():
        suffix = name.removeprefix("dynamo_").upper()
        _map_key_to_env_variable(report, ("dynamo_config", name), f"ACCELERATE_DYNAMO_{suffix}", value)


def _map_fsdp(report: MigrationReport) -> None:
    _map_key_to_env_variable(report, ("distributed_type",), "ACCELERATE_USE_FSDP", "true")
    settings = report.get_source_mapping("fsdp_config")
    for name, value in settings.items():
        variable = _FSDP_VARIABLES.get(name, name.upper() if name.startswith("fsdp_") else f"FSDP_{name.upper()}")
        if value is None:
            report.add_unmapped_key(("fsdp_config", name), UnmappedReason.is_default)
        else:
            _map_key_to_env_variable(report, ("fsdp_config", name), variable, value)
    report.set_config_value(("runner", "env", "FSDP_VERSION"), str(settings.get("fsdp_version", 1)))
    strategy = str(settings.get("fsdp_sharding_strategy", settings.get("fsdp_reshard_after_forward", "FULL_SHARD")))
    strategy = _SHARDING_STRATEGIES.get(strategy, strategy)
    if strategy == "NO_SHARD":
        return
    shard_size = report.get_config_value("runner.default_gpu_count")
    if strategy.startswith("HYBRID_SHARD") and shard_size:
        report.set_config_value("topology.data_parallel_type", "hsdp")
        report.set_config_value("topology.data_parallel_shard_size", shard_size)
        report.add_note("HYBRID_SHARD shards the model over the ranks of a node: topology.data_parallel_shard_size")
    else:
        report.set_config_value("topology.data_parallel_type", "fsdp")
        if strategy in ("SHARD_GRAD_OP", "False"):
            report.add_note("SHARD_GRAD_OP keeps the parameters after the forward pass; fsdp reshards them: less memory, more traffic")
    if settings.get("fsdp_offload_params") or settings.get("fsdp_cpu_offload"):
        report.set_config_value("topology.cpu_offload", True)
    if settings.get("fsdp_activation_checkpointing"):
        report.set_config_value("topology.activation_checkpointing_type", "every_layer")


def _map_deepspeed(report: MigrationReport) -> None:
    _map_key_to_env_variable(report, ("distributed_type",), "ACCELERATE_USE_DEEPSPEED", "true")
    settings = report.get_source_mapping("deepspeed_config")
    for name, value in settings.items():
        key = ("deepspeed_config", name)
        if name == "deepspeed_hostfile":
            report.add_unmapped_key(key, UnmappedReason.done_differently, "use --hostsfile FILE, which fills runner.hosts")
        elif name.startswith(("deepspeed_multinode", "deepspeed_inclusion", "deepspeed_exclusion")):
            report.add_unmapped_key(key, UnmappedReason.done_differently, "runner.hosts")
        elif name in _DEEPSPEED_VARIABLES and value not in (None, "auto"):
            _map_key_to_env_variable(report, key, _DEEPSPEED_VARIABLES[name], value)
        else:
            report.add_unmapped_key(key, UnmappedReason.no_counterpart if value is not None else UnmappedReason.is_default)
    if "deepspeed_config_file" in settings:
        report.add_note(
            "deepspeed_config_file is read by the script on every node: add it to runner.code; swarmtrain import can also read it"
        )
    stage = settings.get("zero_stage")
    if stage in (2, 3):
        report.set_config_value("topology.data_parallel_type", "fsdp")
        if stage == 2:
            report.add_note(
                "ZeRO stage 2 becomes fsdp, which also shards the parameters: less memory, more traffic; ddp with optimizer.zero is stage 1"
            )
        if "cpu" in (settings.get("offload_optimizer_device"), settings.get("offload_param_device")):
            report.set_config_value("topology.cpu_offload", True)
    elif stage == 1:
        report.set_config_value("optimizer.zero", True)
    if isinstance(settings.get("gradient_clipping"), int | float):
        report.set_config_value("optimizer.gradient_clipping", float(settings["gradient_clipping"]))


def _map_megatron(report: MigrationReport) -> None:
    _map_key_to_env_variable(report, ("distributed_type",), "ACCELERATE_USE_MEGATRON_LM", "true")
    paths = {
        "tp_degree": "topology.model_parallel_size",
        "pp_degree": "topology.pipe_parallel_size",
        "sequence_parallelism": "topology.sequence_parallel",
        "gradient_clipping": "optimizer.gradient_clipping",
        "use_distributed_optimizer": "optimizer.zero",
    }
    for name, value in report.get_source_mapping("megatron_lm_config").items():
        setting = name.removeprefix("megatron_lm_")
        _map_key_to_env_variable(report, ("megatron_lm_config", name), f"MEGATRON_LM_{setting.upper()}", value)
        if setting in paths:
            report.set_config_value(paths[setting], value)
    if report.get_source_value("megatron_lm_config.megatron_lm_recompute_activations"):
        report.set_config_value("topology.activation_checkpointing_type", "selective")


def _map_parallelism(report: MigrationReport) -> None:
    report.set_config_value(("runner", "env", "ACCELERATE_USE_PARALLELISM_CONFIG"), "true")
    sizes: dict[str, Any] = {}
    for name, value in report.get_source_mapping("parallelism_config").items():
        setting = name.removeprefix("parallelism_config_")
        sizes[setting] = value
        _map_key_to_env_variable(report, ("parallelism_config", name), f"PARALLELISM_CONFIG_{setting.upper()}", value)
    for setting, path in (("tp_size", "model_parallel_size"), ("cp_size", "context_parallel_size")):
        if isinstance(sizes.get(setting), int):
            report.set_config_value(f"topology.{path}", sizes[setting])
    shard_size, replicate_size = sizes.get("dp_shard_size", 1), sizes.get("dp_replicate_size", 1)
    if isinstance(shard_size, int) and shard_size > 1:
        report.set_config_value("topology.data_parallel_type", "hsdp" if replicate_size != 1 else "fsdp")
        report.set_config_value("topology.data_parallel_shard_size", shard_size if replicate_size != 1 else None)


def _map_key_to_env_variable(report: MigrationReport, key: KeyPath, variable: str, value: Any) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    report.map_key(key, ("runner", "env", variable), text)
