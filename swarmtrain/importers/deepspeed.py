"""Import a DeepSpeed JSON config, and the hostfile of `deepspeed` and Scaling."""

from __future__ import annotations

import re
from typing import Any

from swarmtrain.config.loader import sort_and_limit_problems
from swarmtrain.config.schema.fields.host_entry import check_host_entry as check_host
from swarmtrain.config.schema.fields.host_entry import expand_host_ranges
from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason

KEYS = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("zero_optimization", "zero_allow_untested_optimizer", "bf16", "fp16"),
    )
)
_HOST_PATTERN = re.compile(r"(?P<name>[A-Za-z0-9_.-]+(?:\[[\d,-]+\][A-Za-z0-9_.-]*)?)(?:\s+(?P<slots>slots=\S+))?")
_OPTIMIZER_METHODS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd", "muon": "muon"}
_LOSS_SCALER_KEYS = {
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_scale",
}
_DECAY_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULER_PARAMS, _LEARNING_RATE = "scheduler.params", "learning_rate_scheduler.learning_rate"
_OVERLAPPED_TEXT = "communication overlaps computation by default"
_UNMAPPED_KEYS: dict[str, tuple[UnmappedReason, str]] = {
    "steps_per_print": (UnmappedReason.done_differently, "logger.log_interval"),
    "wall_clock_breakdown": (UnmappedReason.done_differently, "profiler.profile_steps"),
    "dump_state": (UnmappedReason.no_counterpart, ""),
    "prescale_gradients": (UnmappedReason.done_differently, "gradients are summed in double precision"),
    "gradient_predivide_factor": (UnmappedReason.done_differently, "gradients are summed in double precision"),
    "communication_data_type": (UnmappedReason.done_differently, "gradients are summed in double precision"),
    "flops_profiler": (UnmappedReason.done_differently, "profiler.profile_steps; a step's speed is in metrics.jsonl"),
    "tensorboard": (UnmappedReason.done_differently, "logger.use_tensorboard, in logger.log_dir"),
    "csv_monitor": (UnmappedReason.done_differently, "logger.use_csv, in logger.log_dir"),
    "elasticity": (UnmappedReason.done_differently, "runner.min_nodes and max_nodes; the global batch stays the same"),
    "autotuning": (UnmappedReason.done_differently, "swarmtrain memory estimates whether a micro_batch_size fits"),
    "comms_logger": (UnmappedReason.done_differently, "runner.nccl.debug"),
    "checkpoint": (UnmappedReason.done_differently, "checkpoints can be loaded with any topology"),
    "zero_allow_untested_optimizer": (UnmappedReason.no_counterpart, ""),
    "data_types": (UnmappedReason.no_counterpart, "gradients and optimizer state are float32; see optimizer.state_precision"),
    "amp": (UnmappedReason.no_counterpart, "transformer_architecture.precision: bfloat16 or float16"),
    "activation_checkpointing": (UnmappedReason.done_differently, "topology.activation_checkpointing_type"),
}


def is_hostfile(text: str) -> bool:
    """Return whether `text` is a hostfile: each line is a host, and at least one line has slots."""
    lines = [line for _, line in _list_hostfile_lines(text)]
    return (
        bool(lines) and all(_HOST_PATTERN.fullmatch(line) for line in lines) and any(" slots=" in line.replace("\t", " ") for line in lines)
    )


def parse_hostfile(text: str, source_file: str) -> tuple[str, ...]:
    """Return the hosts of the hostfile `text`, as entries of runner.hosts. Raises ConfigError with every invalid line."""
    hosts, problems = [], []
    for number, line in _list_hostfile_lines(text):
        match = _HOST_PATTERN.fullmatch(line)
        try:
            if match is None:
                raise ValueError(f"{line!r} is not a valid hostfile entry, such as 'gpu-1 slots=4'")
            names = expand_host_ranges([match["name"]])
            hosts += [check_host(f"{name} {match['slots']}" if match["slots"] else name) for name in names]
        except ValueError as error:
            problems.append(Problem("hosts", str(error), number))
    if not hosts and not problems:
        problems.append(Problem("hosts", "lists no hosts", hint="add lines such as: gpu-1 slots=4"))
    if problems:
        raise ConfigError(sort_and_limit_problems(problems), source=source_file)
    return tuple(hosts)


def map_hosts(report: MigrationReport, hosts: tuple[str, ...], source_key: KeyPath) -> None:
    """Set runner.hosts to `hosts`, which the source specifies at `source_key`.

    Also set the runner type to ssh if none is set yet, and make GPUs visible in containers.
    """
    report.map_key(source_key, "runner.hosts", list(hosts))
    if report.get_config_value("runner.runner_type") is None:
        report.set_runner_type("ssh")
    report.add_gpu_visibility_setting()


def count_slots(hosts: tuple[str, ...]) -> int | None:
    """Return the total number of slots of `hosts`; None if the slots of a host are unknown."""
    counts = [re.search(r"slots=(\d+)$", host) for host in hosts]
    return sum(int(match[1]) for match in counts if match) if hosts and all(counts) else None


def map_deepspeed_config(report: MigrationReport, hosts: tuple[str, ...] = ()) -> None:
    """Map the DeepSpeed config in `report` to config fields, for a run on `hosts` (empty if the hosts are unknown)."""
    _report_auto_values(report)
    _map_batch_sizes(report, count_slots(hosts))
    map_zero_section(report, ("zero_optimization",))
    _map_precision(report)
    _map_optimizer(report)
    _map_learning_rate_schedule(report)
    _map_wandb(report)
    for name, (reason, replacement) in _UNMAPPED_KEYS.items():
        if report.has_source_key(name):
            report.add_unmapped_key(name, reason, replacement)
    if not report.is_key_handled(("gradient_clipping",)):
        report.set_config_value("optimizer.gradient_clipping", 0.0)
        report.add_note("DeepSpeed does not clip gradients by default: optimizer.gradient_clipping is 0")
    report.add_note(
        "a script that calls deepspeed.initialize still reads its JSON: add the file to runner.code and pass it in runner.script_args"
    )


def map_zero_section(report: MigrationReport, section: KeyPath) -> None:
    """Map DeepSpeed's ZeRO section, at the key `section`, to config fields: the stage and its settings."""
    stage = report.get_source_value((*section, "stage"), 0 if report.has_source_key(section) else None)
    if stage is None:
        return
    stage_key = (*section, "stage")
    if stage == 1:
        report.map_key(stage_key, "optimizer.zero", True)
    elif stage in (2, 3):
        shard_size = report.get_source_value((*section, "mics_shard_size"))
        if isinstance(shard_size, int) and shard_size > 1:
            report.map_key(stage_key, "topology.data_parallel_type", "hsdp")
            report.map_key((*section, "mics_shard_size"), "topology.data_parallel_shard_size", shard_size)
        else:
            report.map_key(stage_key, "topology.data_parallel_type", "fsdp")
        if stage == 2:
            report.add_note(
                "ZeRO stage 2 becomes fsdp, which also shards the parameters: less memory, more traffic; ddp with optimizer.zero is stage 1"
            )
    else:
        report.add_unmapped_key(
            stage_key, UnmappedReason.is_default if stage == 0 else UnmappedReason.no_counterpart, "topology.data_parallel_type: ddp"
        )
    _map_cpu_offload(report, section, is_sharded=stage in (2, 3))
    for key, _ in list(report.iterate_source_leaves(section)):
        if key[: len(section) + 1] == section or key[len(section)] not in (
            "stage",
            "mics_shard_size",
            "offload_optimizer",
            "offload_param",
            "cpu_offload",
        ):
            report.add_unmapped_key(key, UnmappedReason.done_differently, _OVERLAPPED_TEXT)


def _map_cpu_offload(report: MigrationReport, section: KeyPath, *, is_sharded: bool) -> None:
    for name in ("offload_optimizer", "offload_param", "cpu_offload"):
        key = (*section, name)
        if not report.has_source_key(key):
            continue
        device = report.get_source_value((*key, "device"), "cpu" if report.get_source_value(key) is True else "none")
        if device == "cpu" and is_sharded:
            report.map_key((*key, "device") if name != "cpu_offload" else key, "topology.cpu_offload", True)
            if name == "offload_optimizer":
                report.add_note(
                    "topology.cpu_offload keeps the shards of parameters and optimizer state in host memory, and runs the optimizer there"
                )
        elif device == "none" or report.get_source_value(key) is False:
            report.add_unmapped_key(key, UnmappedReason.is_default, "topology.cpu_offload: false")
        else:
            report.add_unmapped_key(key, UnmappedReason.no_counterpart, "topology.cpu_offload supports only host memory, with fsdp or hsdp")
        for inner_key, _ in list(report.iterate_source_leaves(key)):
            if inner_key[-1] != "device" and inner_key != key and device == "cpu" and is_sharded:
                report.add_unmapped_key(inner_key, UnmappedReason.done_differently, "topology.cpu_offload")


def _report_auto_values(report: MigrationReport) -> None:
    """Report "auto" values as unmapped: only Hugging Face's Trainer can fill them in."""
    for key, value in list(report.iterate_source_leaves()):
        if value == "auto":
            report.add_unmapped_key(key, UnmappedReason.unknown, "Hugging Face's Trainer fills it in from its own arguments")
            _delete_key(report.source, key)


def _delete_key(source_values: Any, key: KeyPath) -> None:
    for key_part in key[:-1]:
        source_values = source_values[int(key_part)] if isinstance(source_values, list) else source_values[key_part]
    if isinstance(source_values, dict):
        del source_values[key[-1]]


def _map_batch_sizes(report: MigrationReport, world_size: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    global_batch_size, micro_batch_size, accumulation_steps = (report.get_source_value(name) for name in names)
    if global_batch_size is None and micro_batch_size is None:
        if accumulation_steps is not None:
            report.add_unmapped_key(names[2], UnmappedReason.done_differently, "topology.global_batch_size / (micro_batch_size x replicas)")
        return
    rank_count = world_size or 1
    if not all(value is None or (type(value) is int and value > 0) for value in (global_batch_size, micro_batch_size, accumulation_steps)):
        for name, path in zip(names, ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"), strict=True):
            if report.has_source_key(name):
                report.map_key(name, f"topology.{path}")
        return
    if global_batch_size is None:
        report.set_config_value("topology.global_batch_size", micro_batch_size * (accumulation_steps or 1) * rank_count)
        report.map_key(names[1], "topology.micro_batch_size", micro_batch_size)
        rank_source = (
            f"{rank_count} ranks of the hostfile"
            if world_size
            else "1 rank: multiply it by the number of ranks, or pass the hostfile with --hostsfile"
        )
        report.add_note(f"topology.global_batch_size is {micro_batch_size} x {accumulation_steps or 1} x {rank_source}")
    else:
        report.map_key(names[0], "topology.global_batch_size", global_batch_size)
        micro_batch = micro_batch_size or max(1, global_batch_size // ((accumulation_steps or 1) * rank_count))
        report.set_config_value("topology.micro_batch_size", micro_batch)
        if micro_batch_size is not None:
            report.map_key(names[1], "topology.micro_batch_size", micro_batch_size)
        else:
            report.add_note(
                f"topology.micro_batch_size is computed for {rank_count} rank{'' if rank_count == 1 else 's'}: reduce it if necessary "
                f"for memory"
            )
    if accumulation_steps is not None:
        report.add_unmapped_key(
            names[2], UnmappedReason.done_differently, "follows from global_batch_size, micro_batch_size and the number of replicas"
        )


def _map_precision(report: MigrationReport) -> None:
    for section in ("bf16", "bfloat16"):
        if report.get_source_value(f"{section}.enabled"):
            report.map_key(f"{section}.enabled", "transformer_architecture.precision", "bfloat16")
        elif report.has_source_key(f"{section}.enabled"):
            report.add_unmapped_key(f"{section}.enabled", UnmappedReason.is_default, "transformer_architecture.precision")
    if not report.get_source_value("fp16.enabled"):
        if report.has_source_key("fp16"):
            report.add_unmapped_key("fp16", UnmappedReason.is_default, "transformer_architecture.precision")
        return
    report.map_key("fp16.enabled", "transformer_architecture.precision", "float16")
    for name, setting in _LOSS_SCALER_KEYS.items():
        if report.has_source_key(f"fp16.{name}"):
            report.map_key(f"fp16.{name}", f"optimizer.loss_scaler.{setting}")
    power = report.get_source_value("fp16.initial_scale_power")
    if power is not None:
        report.map_key(
            "fp16.initial_scale_power", "optimizer.loss_scaler.initial_scale", 2.0**power if type(power) is int and power < 99 else power
        )
    if report.get_source_value("fp16.loss_scale"):
        report.add_unmapped_key(
            "fp16.loss_scale",
            UnmappedReason.no_counterpart,
            "loss scaling is always dynamic, starting from optimizer.loss_scaler.initial_scale",
        )
    elif report.has_source_key("fp16.loss_scale"):
        report.add_unmapped_key("fp16.loss_scale", UnmappedReason.is_default, "loss scaling is always dynamic")


def _map_optimizer(report: MigrationReport) -> None:
    if report.has_source_key("gradient_clipping"):
        report.map_key("gradient_clipping", "optimizer.gradient_clipping")
    if not report.has_source_key("optimizer"):
        return
    name = str(report.get_source_value("optimizer.type"))
    if name.lower() in _OPTIMIZER_METHODS:
        report.map_key("optimizer.type", "optimizer.method", _OPTIMIZER_METHODS[name.lower()])
    else:
        report.add_unmapped_key("optimizer.type", UnmappedReason.no_counterpart, "optimizer.method: adamw, sgd or muon")
    params_prefix = "optimizer.params."
    for field, path in (("lr", "learning_rate_scheduler.learning_rate"), ("eps", "optimizer.eps"), ("momentum", "optimizer.momentum")):
        if report.has_source_key(params_prefix + field):
            report.map_key(params_prefix + field, path)
    betas = report.get_source_value(params_prefix + "betas")
    if isinstance(betas, list) and len(betas) == 2:
        report.map_key(params_prefix + "betas", "optimizer.beta1", betas[0])
        report.set_config_value("optimizer.beta2", betas[1])
    elif name.lower() in ("adam", "adamw", "fusedadam") and not report.is_key_handled(("optimizer", "params", "betas")):
        report.set_config_value("optimizer.beta2", 0.999)
        report.add_note("the JSON sets no betas, so torch's defaults apply: optimizer.beta2 is 0.999")
    decay = report.get_source_value(params_prefix + "weight_decay")
    if decay is not None:
        report.map_key(params_prefix + "weight_decay", "training_groups", [{"group_name": "all", "weight_decay": decay}])
        report.add_note("weight decay is decoupled, as in AdamW, and applies to all parameters: see training_groups")
    elif not report.is_key_handled(("optimizer", "params", "weight_decay")):
        report.set_config_value("training_groups", [{"group_name": "all", "weight_decay": 0.0}])
        report.add_note("DeepSpeed does not decay weights by default: training_groups has weight_decay 0")
    for key, _ in list(report.iterate_source_leaves("optimizer")):
        if key[-1] in ("torch_adam", "adam_w_mode", "fused", "bias_correction", "amsgrad", "cuda_aware", "comm_backend_name"):
            report.add_unmapped_key(key, UnmappedReason.no_counterpart, "")


def _map_learning_rate_schedule(report: MigrationReport) -> None:
    if not report.has_source_key("scheduler"):
        if report.has_source_key("optimizer"):
            report.set_config_value("learning_rate_scheduler.learning_rate_decay_style", "constant")
            report.add_note("DeepSpeed keeps the learning rate constant if the JSON has no scheduler")
        return
    style = _DECAY_STYLES.get(str(report.get_source_value("scheduler.type")))
    if style is None:
        report.add_unmapped_key("scheduler", UnmappedReason.no_counterpart, "learning_rate_scheduler")
        return
    report.map_key("scheduler.type", f"{_LEARNING_RATE}_decay_style", style)
    if report.get_source_value(f"{_SCHEDULER_PARAMS}.total_num_steps") is not None:
        report.map_key(f"{_SCHEDULER_PARAMS}.total_num_steps", f"{_LEARNING_RATE}_decay_iters")
        report.set_config_value("trainer.train_iterations", report.get_source_value(f"{_SCHEDULER_PARAMS}.total_num_steps"))
        report.add_note("trainer.train_iterations is total_num_steps, where the learning rate reaches its minimum")
    _map_learning_rate_warmup(
        report, is_logarithmic=style != "cosine" or report.get_source_value(f"{_SCHEDULER_PARAMS}.warmup_type") == "log"
    )
    min_ratio, learning_rate = report.get_source_value(f"{_SCHEDULER_PARAMS}.cos_min_ratio", 1e-4), report.get_config_value(_LEARNING_RATE)
    if style == "cosine" and isinstance(min_ratio, int | float) and isinstance(learning_rate, int | float):
        report.set_config_value(f"{_LEARNING_RATE}_minimum", min_ratio * learning_rate)
        report.mark_keys_handled(f"{_SCHEDULER_PARAMS}.cos_min_ratio")
        report.add_note(f"learning_rate_minimum is cos_min_ratio x learning_rate: {min_ratio:g} x {learning_rate:g}")


def _map_learning_rate_warmup(report: MigrationReport, *, is_logarithmic: bool) -> None:
    if report.get_source_value(f"{_SCHEDULER_PARAMS}.warmup_max_lr") is not None:
        report.map_key(f"{_SCHEDULER_PARAMS}.warmup_max_lr", _LEARNING_RATE)
    if report.get_source_value(f"{_SCHEDULER_PARAMS}.warmup_num_steps") is not None:
        report.map_key(f"{_SCHEDULER_PARAMS}.warmup_num_steps", f"{_LEARNING_RATE}_warmup_steps")
    elif not report.is_key_handled((*_SCHEDULER_PARAMS.split("."), "warmup_num_steps")):
        report.set_config_value(f"{_LEARNING_RATE}_warmup_steps", 1000)
        report.add_note("DeepSpeed's default for warmup_num_steps applies: learning_rate_warmup_steps is 1000")
    if report.has_source_key(f"{_SCHEDULER_PARAMS}.warmup_min_lr"):
        min_learning_rate = report.get_source_value(f"{_SCHEDULER_PARAMS}.warmup_min_lr")
        report.add_unmapped_key(
            f"{_SCHEDULER_PARAMS}.warmup_min_lr",
            UnmappedReason.no_counterpart if min_learning_rate else UnmappedReason.is_default,
            "the warmup starts at 0",
        )
    if report.has_source_key(f"{_SCHEDULER_PARAMS}.warmup_type"):
        is_linear = report.get_source_value(f"{_SCHEDULER_PARAMS}.warmup_type") == "linear"
        report.add_unmapped_key(
            f"{_SCHEDULER_PARAMS}.warmup_type",
            UnmappedReason.is_default if is_linear else UnmappedReason.no_counterpart,
            "the warmup is linear",
        )
        is_logarithmic = not is_linear
    if is_logarithmic:
        report.add_note("DeepSpeed's warmup is logarithmic unless warmup_type is linear; swarmtrain's is always linear")


def _map_wandb(report: MigrationReport) -> None:
    if not report.has_source_key("wandb"):
        return
    for name, path in (("enabled", "use_wandb"), ("team", "wandb_team"), ("project", "wandb_project"), ("group", "wandb_group")):
        if report.has_source_key(f"wandb.{name}"):
            report.map_key(f"wandb.{name}", f"logger.{path}")


def _list_hostfile_lines(text: str) -> list[tuple[int, str]]:
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line]
