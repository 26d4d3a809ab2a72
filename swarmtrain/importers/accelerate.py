"""A config of Hugging Face's accelerate.

It is for scripts that make an Accelerator, which reads what `accelerate launch` puts into the environment: that goes into runner.env,
so that such a script runs as before. What swarmtrain's own trainer has too goes into its keys beside it.
"""

from __future__ import annotations

from typing import Any

from swarmtrain.importers import deepspeed
from swarmtrain.importers.book import Book, Key, Why
from swarmtrain.importers.launch import MEETING

KEYS = frozenset(("compute_environment", "distributed_type", "num_processes", "num_machines"))
_PRECISION = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
_STRATEGY = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
# Variables that are not called as their keys are.
_FSDP = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
    "fsdp_cpu_offload": "FSDP_OFFLOAD_PARAMS",
}
_DEEPSPEED = {
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
_LEFT: dict[str, tuple[Why, str]] = {
    "compute_environment": (Why.otherwise, "runner.runner_type"),
    "machine_rank": (Why.otherwise, MEETING),
    "main_process_ip": (Why.otherwise, MEETING),
    "rdzv_backend": (Why.otherwise, MEETING),
    "same_network": (Why.otherwise, MEETING),
    "main_training_function": (Why.otherwise, "runner.script is started as a file"),
    "downcast_bf16": (Why.nothing, "TPUs alone"),
    "commands": (Why.nothing, ""),
    "command_file": (Why.nothing, ""),
}


def read(book: Book, hosts: tuple[str, ...] = ()) -> None:
    """Carry an accelerate config, of a run on `hosts` if they are known."""
    kind = str(book.get("distributed_type", "NO"))
    _machines(book, kind, hosts)
    _environment(book)
    if kind == "FSDP" or (book.mapping("fsdp_config") and kind != "DEEPSPEED"):
        _fsdp(book)
    if kind == "DEEPSPEED" or book.mapping("deepspeed_config"):
        _deepspeed(book)
    if book.mapping("megatron_lm_config"):
        _megatron(book)
    if book.mapping("parallelism_config"):
        _parallelism(book)
    for name, value in book.source.items():
        if name in _LEFT:
            book.leave(name, *_LEFT[name])
        elif name.startswith("tpu_") or (value in ({}, [], None) and not name.startswith("main_process")):
            book.leave(name, Why.nothing if value else Why.default, "TPUs alone" if name.startswith("tpu_") else "")
    book.note(
        "runner.env has what `accelerate launch` sets: a script with an Accelerator runs as before; set runner.script and script_args"
    )
    book.note("topology and transformer_architecture are for swarmtrain's own trainer alone")


def _machines(book: Book, kind: str, hosts: tuple[str, ...]) -> None:
    nodes, ranks = book.get("num_machines", 1), book.get("num_processes")
    multi = isinstance(nodes, int) and nodes > 1
    book.place("swarm" if multi else "local")
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"):
        book.leave("distributed_type", Why.otherwise, "every run is distributed; CPU or GPU is what the nodes have")
    elif book.has("distributed_type"):
        book.leave("distributed_type", Why.nothing, "GPUs of NVIDIA's, or CPUs")
    if hosts:
        deepspeed.carry_hosts(book, hosts, ("hostsfile",))
        book.leave("num_machines", Why.otherwise, "the hosts of the hostfile")
        book.leave("num_processes", Why.otherwise, "the slots of the hostfile")
    else:
        if book.has("num_machines"):
            book.carry("num_machines", "runner.nodes")
        if isinstance(ranks, int) and isinstance(nodes, int) and nodes > 0 and ranks % nodes == 0:
            book.carry("num_processes", "runner.default_gpu_count", ranks // nodes)
            if multi:
                book.note(f"num_processes counts the ranks of all machines: {ranks} on {nodes} are {ranks // nodes} on each")
        elif book.has("num_processes"):
            book.leave("num_processes", Why.nothing, "name the hosts with their slots: runner.hosts: [gpu-1 slots=4, gpu-2 slots=3]")
    if isinstance(book.get("main_process_port"), int) and book.get("main_process_port"):
        book.carry("main_process_port", "runner.master_port")
    elif book.has("main_process_port"):
        book.leave("main_process_port", Why.default, "runner.master_port")
    _gpus(book, multi=multi, cpu=bool(book.get("use_cpu")) or kind == "MULTI_CPU")


def _gpus(book: Book, *, multi: bool, cpu: bool) -> None:
    ids = book.get("gpu_ids")
    if multi and not cpu:
        book.show_gpus()
    if ids in (None, "all"):
        if book.has("gpu_ids"):
            book.leave("gpu_ids", Why.default, "all GPUs of a host")
    elif multi:
        book.carry("gpu_ids", "runner.swarm.gpu_ids", str(ids).replace(" ", "").split(","))
    else:
        book.carry("gpu_ids", ("runner", "env", "CUDA_VISIBLE_DEVICES"), str(ids))


def _environment(book: Book) -> None:
    precision = book.get("mixed_precision")
    precision = "no" if precision is False else precision
    if precision is not None:
        _set(book, ("mixed_precision",), "ACCELERATE_MIXED_PRECISION", str(precision))
        if str(precision) in _PRECISION:
            book.put("transformer_architecture.precision", _PRECISION[str(precision)])
        else:
            book.note("float8 is by layer here: transformer_architecture.fp8_config_mlp and its like")
    for name, variable, wanted in (
        ("use_cpu", "ACCELERATE_USE_CPU", "true"),
        ("debug", "ACCELERATE_DEBUG_MODE", "true"),
        ("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY", "1"),
    ):
        if book.get(name):
            _set(book, (name,), variable, wanted)
        elif book.has(name):
            book.leave(name, Why.default)
    if book.get("num_cpu_threads_per_process"):
        _set(book, ("num_cpu_threads_per_process",), "OMP_NUM_THREADS", book.get("num_cpu_threads_per_process"))
    for name, value in book.mapping("dynamo_config").items():
        suffix = name.removeprefix("dynamo_").upper()
        _set(book, ("dynamo_config", name), f"ACCELERATE_DYNAMO_{suffix}", value)


def _fsdp(book: Book) -> None:
    _set(book, ("distributed_type",), "ACCELERATE_USE_FSDP", "true")
    settings = book.mapping("fsdp_config")
    for name, value in settings.items():
        variable = _FSDP.get(name, name.upper() if name.startswith("fsdp_") else f"FSDP_{name.upper()}")
        if value is None:
            book.leave(("fsdp_config", name), Why.default)
        else:
            _set(book, ("fsdp_config", name), variable, value)
    book.put(("runner", "env", "FSDP_VERSION"), str(settings.get("fsdp_version", 1)))
    strategy = str(settings.get("fsdp_sharding_strategy", settings.get("fsdp_reshard_after_forward", "FULL_SHARD")))
    strategy = _STRATEGY.get(strategy, strategy)
    if strategy == "NO_SHARD":
        return
    shard = book.carried("runner.default_gpu_count")
    if strategy.startswith("HYBRID_SHARD") and shard:
        book.put("topology.data_parallel_type", "hsdp")
        book.put("topology.data_parallel_shard_size", shard)
        book.note("HYBRID_SHARD divides the model over the ranks of a node: topology.data_parallel_shard_size")
    else:
        book.put("topology.data_parallel_type", "fsdp")
        if strategy in ("SHARD_GRAD_OP", "False"):
            book.note("SHARD_GRAD_OP keeps the parameters after the forward pass; fsdp divides them again: less memory, more traffic")
    if settings.get("fsdp_offload_params") or settings.get("fsdp_cpu_offload"):
        book.put("topology.cpu_offload", True)
    if settings.get("fsdp_activation_checkpointing"):
        book.put("topology.activation_checkpointing_type", "every_layer")


def _deepspeed(book: Book) -> None:
    _set(book, ("distributed_type",), "ACCELERATE_USE_DEEPSPEED", "true")
    settings = book.mapping("deepspeed_config")
    for name, value in settings.items():
        key = ("deepspeed_config", name)
        if name == "deepspeed_hostfile":
            book.leave(key, Why.otherwise, "--hostsfile FILE puts it into runner.hosts")
        elif name.startswith(("deepspeed_multinode", "deepspeed_inclusion", "deepspeed_exclusion")):
            book.leave(key, Why.otherwise, "runner.hosts")
        elif name in _DEEPSPEED and value not in (None, "auto"):
            _set(book, key, _DEEPSPEED[name], value)
        else:
            book.leave(key, Why.nothing if value is not None else Why.default)
    if "deepspeed_config_file" in settings:
        book.note("deepspeed_config_file is read by the script on every node: put it into runner.code; swarmtrain import reads it too")
    stage = settings.get("zero_stage")
    if stage in (2, 3):
        book.put("topology.data_parallel_type", "fsdp")
        if stage == 2:
            book.note(
                "ZeRO stage 2 is fsdp here, which divides the parameters too: less memory, more traffic; ddp with optimizer.zero is stage 1"
            )
        if "cpu" in (settings.get("offload_optimizer_device"), settings.get("offload_param_device")):
            book.put("topology.cpu_offload", True)
    elif stage == 1:
        book.put("optimizer.zero", True)
    if isinstance(settings.get("gradient_clipping"), int | float):
        book.put("optimizer.gradient_clipping", float(settings["gradient_clipping"]))


def _megatron(book: Book) -> None:
    _set(book, ("distributed_type",), "ACCELERATE_USE_MEGATRON_LM", "true")
    paths = {
        "tp_degree": "topology.model_parallel_size",
        "pp_degree": "topology.pipe_parallel_size",
        "sequence_parallelism": "topology.sequence_parallel",
        "gradient_clipping": "optimizer.gradient_clipping",
        "use_distributed_optimizer": "optimizer.zero",
    }
    for name, value in book.mapping("megatron_lm_config").items():
        short = name.removeprefix("megatron_lm_")
        _set(book, ("megatron_lm_config", name), f"MEGATRON_LM_{short.upper()}", value)
        if short in paths:
            book.put(paths[short], value)
    if book.get("megatron_lm_config.megatron_lm_recompute_activations"):
        book.put("topology.activation_checkpointing_type", "selective")


def _parallelism(book: Book) -> None:
    book.put(("runner", "env", "ACCELERATE_USE_PARALLELISM_CONFIG"), "true")
    sizes: dict[str, Any] = {}
    for name, value in book.mapping("parallelism_config").items():
        short = name.removeprefix("parallelism_config_")
        sizes[short] = value
        _set(book, ("parallelism_config", name), f"PARALLELISM_CONFIG_{short.upper()}", value)
    for short, path in (("tp_size", "model_parallel_size"), ("cp_size", "context_parallel_size")):
        if isinstance(sizes.get(short), int):
            book.put(f"topology.{path}", sizes[short])
    shard, copies = sizes.get("dp_shard_size", 1), sizes.get("dp_replicate_size", 1)
    if isinstance(shard, int) and shard > 1:
        book.put("topology.data_parallel_type", "hsdp" if copies != 1 else "fsdp")
        book.put("topology.data_parallel_shard_size", shard if copies != 1 else None)


def _set(book: Book, key: Key, variable: str, value: Any) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    book.carry(key, ("runner", "env", variable), text)
