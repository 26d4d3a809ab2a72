"""DeepSpeed: its JSON, and the hostfile that `deepspeed` and Scaling share."""

from __future__ import annotations

import re
from typing import Any

from swarmtrain.config.load import order_problems
from swarmtrain.config.names import host as check_host
from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.book import Book, Key, Why

KEYS = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("zero_optimization", "zero_allow_untested_optimizer", "bf16", "fp16"),
    )
)
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_.-]+(?:\[[\d,-]+\][A-Za-z0-9_.-]*)?)(?:\s+(?P<slots>slots=\S+))?")
_RANGE = re.compile(r"\[([\d,-]+)\]")
_MOST = 10_000
_METHODS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd", "muon": "muon"}
_SCALER = {
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_scale",
}
_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_PARAMS, _RATE = "scheduler.params", "learning_rate_scheduler.learning_rate"
_TRAINER = "exchanges go on during the computation by themselves"
_LEFT: dict[str, tuple[Why, str]] = {
    "steps_per_print": (Why.otherwise, "logger.log_interval"),
    "wall_clock_breakdown": (Why.otherwise, "profiler.profile_steps"),
    "dump_state": (Why.nothing, ""),
    "prescale_gradients": (Why.otherwise, "gradients are summed in double precision"),
    "gradient_predivide_factor": (Why.otherwise, "gradients are summed in double precision"),
    "communication_data_type": (Why.otherwise, "gradients are summed in double precision"),
    "flops_profiler": (Why.otherwise, "profiler.profile_steps; a step's speed is in metrics.jsonl"),
    "tensorboard": (Why.otherwise, "logger.use_tensorboard, in logger.log_dir"),
    "csv_monitor": (Why.otherwise, "logger.use_csv, in logger.log_dir"),
    "elasticity": (Why.otherwise, "runner.min_nodes and max_nodes; the global batch stays what it is"),
    "autotuning": (Why.otherwise, "swarmtrain memory says which micro_batch_size fits"),
    "comms_logger": (Why.otherwise, "runner.nccl.debug"),
    "checkpoint": (Why.otherwise, "every checkpoint fits any topology"),
    "zero_allow_untested_optimizer": (Why.nothing, ""),
    "data_types": (Why.nothing, "gradients and state are float32; optimizer.state_precision"),
    "amp": (Why.nothing, "bf16 or fp16"),
    "activation_checkpointing": (Why.otherwise, "topology.activation_checkpointing_type"),
}


def is_hostfile(text: str) -> bool:
    """Return whether each line of `text` names a host, and one its slots."""
    lines = [line for _, line in _lines(text)]
    return bool(lines) and all(_HOST.fullmatch(line) for line in lines) and any(" slots=" in line.replace("\t", " ") for line in lines)


def read_hosts(text: str, source: str) -> tuple[str, ...]:
    """Return the hosts of a hostfile, as runner.hosts has them. Raises ConfigError with every line that is none."""
    hosts, problems = [], []
    for number, line in _lines(text):
        found = _HOST.fullmatch(line)
        try:
            if found is None:
                raise ValueError(f"{line!r} is not a host with its slots, as in 'gpu-1 slots=4'")
            names = _expanded(found["name"])
            hosts += [check_host(f"{name} {found['slots']}" if found["slots"] else name) for name in names]
        except ValueError as error:
            problems.append(Problem("hosts", str(error), number))
    if not hosts and not problems:
        problems.append(Problem("hosts", "names no host", hint="a hostfile has lines such as: gpu-1 slots=4"))
    if problems:
        raise ConfigError(order_problems(problems), source=source)
    return tuple(hosts)


def carry_hosts(book: Book, hosts: tuple[str, ...], key: Key) -> None:
    """Put `hosts` where ranks run."""
    book.carry(key, "runner.hosts", list(hosts))
    if book.carried("runner.runner_type") is None:
        book.place("pdsh")
    book.show_gpus()


def ranks(hosts: tuple[str, ...]) -> int | None:
    """Return how many slots `hosts` have together, None if one does not say."""
    counts = [re.search(r"slots=(\d+)$", host) for host in hosts]
    return sum(int(found[1]) for found in counts if found) if hosts and all(counts) else None


def read(book: Book, hosts: tuple[str, ...] = ()) -> None:
    """Carry a DeepSpeed JSON, of a run on `hosts` if they are known."""
    _auto(book)
    _batch(book, ranks(hosts))
    zero(book, ("zero_optimization",))
    _precision(book)
    _optimizer(book)
    _schedule(book)
    _wandb(book)
    for name, (why, instead) in _LEFT.items():
        if book.has(name):
            book.leave(name, why, instead)
    if not book.spoken(("gradient_clipping",)):
        book.put("optimizer.gradient_clipping", 0.0)
        book.note("DeepSpeed clips nothing unless told to: optimizer.gradient_clipping is 0")
    book.note(
        "a script that calls deepspeed.initialize goes on reading its JSON: put it into runner.code and name it in runner.script_args"
    )


def zero(book: Book, section: Key) -> None:
    """Carry ZeRO's stage and what belongs to it."""
    stage = book.get((*section, "stage"), 0 if book.has(section) else None)
    if stage is None:
        return
    at = (*section, "stage")
    if stage == 1:
        book.carry(at, "optimizer.zero", True)
    elif stage in (2, 3):
        shard = book.get((*section, "mics_shard_size"))
        if isinstance(shard, int) and shard > 1:
            book.carry(at, "topology.data_parallel_type", "hsdp")
            book.carry((*section, "mics_shard_size"), "topology.data_parallel_shard_size", shard)
        else:
            book.carry(at, "topology.data_parallel_type", "fsdp")
        if stage == 2:
            book.note(
                "ZeRO stage 2 is fsdp here, which divides the parameters too: less memory, more traffic; ddp with optimizer.zero is stage 1"
            )
    else:
        book.leave(at, Why.default if stage == 0 else Why.nothing, "topology.data_parallel_type: ddp")
    _offload(book, section, divided=stage in (2, 3))
    for key, _ in list(book.leaves(section)):
        if key[: len(section) + 1] == section or key[len(section)] not in (
            "stage",
            "mics_shard_size",
            "offload_optimizer",
            "offload_param",
            "cpu_offload",
        ):
            book.leave(key, Why.otherwise, _TRAINER)


def _offload(book: Book, section: Key, *, divided: bool) -> None:
    for name in ("offload_optimizer", "offload_param", "cpu_offload"):
        key = (*section, name)
        if not book.has(key):
            continue
        device = book.get((*key, "device"), "cpu" if book.get(key) is True else "none")
        if device == "cpu" and divided:
            book.carry((*key, "device") if name != "cpu_offload" else key, "topology.cpu_offload", True)
            if name == "offload_optimizer":
                book.note("topology.cpu_offload keeps parts of parameters and of optimizer state in the node's memory, and steps there")
        elif device == "none" or book.get(key) is False:
            book.leave(key, Why.default, "topology.cpu_offload: false")
        else:
            book.leave(key, Why.nothing, "topology.cpu_offload is the node's memory, for fsdp and hsdp")
        for inner, _ in list(book.leaves(key)):
            if inner[-1] != "device" and inner != key and device == "cpu" and divided:
                book.leave(inner, Why.otherwise, "topology.cpu_offload")


def _auto(book: Book) -> None:
    """What Hugging Face's Trainer fills in is known to it alone."""
    for key, value in list(book.leaves()):
        if value == "auto":
            book.leave(key, Why.unknown, "Hugging Face's Trainer fills it in from its own arguments")
            _forget(book.source, key)


def _forget(values: Any, key: Key) -> None:
    for part in key[:-1]:
        values = values[int(part)] if isinstance(values, list) else values[part]
    if isinstance(values, dict):
        del values[key[-1]]


def _batch(book: Book, world: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (book.get(name) for name in names)
    if total is None and micro is None:
        if steps is not None:
            book.leave(names[2], Why.otherwise, "topology.global_batch_size / (micro_batch_size x replicas)")
        return
    count = world or 1
    if not all(value is None or (type(value) is int and value > 0) for value in (total, micro, steps)):
        for name, path in zip(names, ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"), strict=True):
            if book.has(name):
                book.carry(name, f"topology.{path}")
        return
    if total is None:
        book.put("topology.global_batch_size", micro * (steps or 1) * count)
        book.carry(names[1], "topology.micro_batch_size", micro)
        known_by = f"{count} ranks of the hostfile" if world else "1 rank: multiply it by yours, or import the hostfile with it"
        book.note(f"topology.global_batch_size is {micro} x {steps or 1} x {known_by}")
    else:
        book.carry(names[0], "topology.global_batch_size", total)
        share = micro or max(1, total // ((steps or 1) * count))
        book.put("topology.micro_batch_size", share)
        if micro is not None:
            book.carry(names[1], "topology.micro_batch_size", micro)
        else:
            book.note(
                f"topology.micro_batch_size is what {count} rank{'' if count == 1 else 's'} would take at a time: lower it for memory"
            )
    if steps is not None:
        book.leave(names[2], Why.otherwise, "follows from global_batch_size, micro_batch_size and the number of replicas")


def _precision(book: Book) -> None:
    for section in ("bf16", "bfloat16"):
        if book.get(f"{section}.enabled"):
            book.carry(f"{section}.enabled", "transformer_architecture.precision", "bfloat16")
        elif book.has(f"{section}.enabled"):
            book.leave(f"{section}.enabled", Why.default, "transformer_architecture.precision")
    if not book.get("fp16.enabled"):
        if book.has("fp16"):
            book.leave("fp16", Why.default, "transformer_architecture.precision")
        return
    book.carry("fp16.enabled", "transformer_architecture.precision", "float16")
    for name, setting in _SCALER.items():
        if book.has(f"fp16.{name}"):
            book.carry(f"fp16.{name}", f"optimizer.loss_scaler.{setting}")
    power = book.get("fp16.initial_scale_power")
    if power is not None:
        book.carry(
            "fp16.initial_scale_power", "optimizer.loss_scaler.initial_scale", 2.0**power if type(power) is int and power < 99 else power
        )
    if book.get("fp16.loss_scale"):
        book.leave("fp16.loss_scale", Why.nothing, "the scale is found as training goes, from optimizer.loss_scaler.initial_scale")
    elif book.has("fp16.loss_scale"):
        book.leave("fp16.loss_scale", Why.default, "the scale is found as training goes")


def _optimizer(book: Book) -> None:
    if book.has("gradient_clipping"):
        book.carry("gradient_clipping", "optimizer.gradient_clipping")
    if not book.has("optimizer"):
        return
    name = str(book.get("optimizer.type"))
    if name.lower() in _METHODS:
        book.carry("optimizer.type", "optimizer.method", _METHODS[name.lower()])
    else:
        book.leave("optimizer.type", Why.nothing, "optimizer.method: adamw, sgd or muon")
    params = "optimizer.params."
    for field, path in (("lr", "learning_rate_scheduler.learning_rate"), ("eps", "optimizer.eps"), ("momentum", "optimizer.momentum")):
        if book.has(params + field):
            book.carry(params + field, path)
    betas = book.get(params + "betas")
    if isinstance(betas, list) and len(betas) == 2:
        book.carry(params + "betas", "optimizer.beta1", betas[0])
        book.put("optimizer.beta2", betas[1])
    elif name.lower() in ("adam", "adamw", "fusedadam") and not book.spoken(("optimizer", "params", "betas")):
        book.put("optimizer.beta2", 0.999)
        book.note("torch's own betas hold where the JSON has none: optimizer.beta2 is 0.999")
    decay = book.get(params + "weight_decay")
    if decay is not None:
        book.carry(params + "weight_decay", "training_groups", [{"group_name": "all", "weight_decay": decay}])
        book.note("weight decay is decoupled, as AdamW's, and of all parameters: training_groups")
    elif not book.spoken(("optimizer", "params", "weight_decay")):
        book.put("training_groups", [{"group_name": "all", "weight_decay": 0.0}])
        book.note("DeepSpeed decays no weights unless told to: training_groups has weight_decay 0")
    for key, _ in list(book.leaves("optimizer")):
        if key[-1] in ("torch_adam", "adam_w_mode", "fused", "bias_correction", "amsgrad", "cuda_aware", "comm_backend_name"):
            book.leave(key, Why.nothing, "")


def _schedule(book: Book) -> None:
    if not book.has("scheduler"):
        if book.has("optimizer"):
            book.put("learning_rate_scheduler.learning_rate_decay_style", "constant")
            book.note("DeepSpeed keeps the learning rate as it is where the JSON has no scheduler: constant")
        return
    style = _STYLES.get(str(book.get("scheduler.type")))
    if style is None:
        book.leave("scheduler", Why.nothing, "learning_rate_scheduler")
        return
    book.carry("scheduler.type", f"{_RATE}_decay_style", style)
    if book.get(f"{_PARAMS}.total_num_steps") is not None:
        book.carry(f"{_PARAMS}.total_num_steps", f"{_RATE}_decay_iters")
        book.put("trainer.train_iterations", book.get(f"{_PARAMS}.total_num_steps"))
        book.note("trainer.train_iterations is total_num_steps, where the learning rate reaches its minimum")
    _warm_up(book, logarithmic=style != "cosine" or book.get(f"{_PARAMS}.warmup_type") == "log")
    ratio, rate = book.get(f"{_PARAMS}.cos_min_ratio", 1e-4), book.carried(_RATE)
    if style == "cosine" and isinstance(ratio, int | float) and isinstance(rate, int | float):
        book.put(f"{_RATE}_minimum", ratio * rate)
        book.use(f"{_PARAMS}.cos_min_ratio")
        book.note(f"learning_rate_minimum is cos_min_ratio x learning_rate: {ratio:g} x {rate:g}")


def _warm_up(book: Book, *, logarithmic: bool) -> None:
    if book.get(f"{_PARAMS}.warmup_max_lr") is not None:
        book.carry(f"{_PARAMS}.warmup_max_lr", _RATE)
    if book.get(f"{_PARAMS}.warmup_num_steps") is not None:
        book.carry(f"{_PARAMS}.warmup_num_steps", f"{_RATE}_warmup_steps")
    elif not book.spoken((*_PARAMS.split("."), "warmup_num_steps")):
        book.put(f"{_RATE}_warmup_steps", 1000)
        book.note("DeepSpeed's own warmup_num_steps holds: learning_rate_warmup_steps is 1000")
    if book.has(f"{_PARAMS}.warmup_min_lr"):
        rises = book.get(f"{_PARAMS}.warmup_min_lr")
        book.leave(f"{_PARAMS}.warmup_min_lr", Why.nothing if rises else Why.default, "the warm-up rises from 0")
    if book.has(f"{_PARAMS}.warmup_type"):
        linear = book.get(f"{_PARAMS}.warmup_type") == "linear"
        book.leave(f"{_PARAMS}.warmup_type", Why.default if linear else Why.nothing, "the warm-up is linear")
        logarithmic = not linear
    if logarithmic:
        book.note("DeepSpeed's warm-up rises with the logarithm of the step unless warmup_type is linear; here it is linear")


def _wandb(book: Book) -> None:
    if not book.has("wandb"):
        return
    for name, path in (("enabled", "use_wandb"), ("team", "wandb_team"), ("project", "wandb_project"), ("group", "wandb_group")):
        if book.has(f"wandb.{name}"):
            book.carry(f"wandb.{name}", f"logger.{path}")


def _lines(text: str) -> list[tuple[int, str]]:
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line]


def _expanded(name: str) -> list[str]:
    """Return the names that one with a range stands for: gpu[01-03,7]."""
    found = _RANGE.search(name)
    if found is None:
        return [name]
    names: list[str] = []
    for part in found[1].split(","):
        low, _, high = part.partition("-")
        first, last = int(low or -1), int(high or low or -1)
        if first < 0 or not first <= last < first + _MOST:
            raise ValueError(f"{name!r} has a range that names no hosts: {part!r}")
        names += [f"{name[: found.start()]}{number:0{len(low)}}{name[found.end() :]}" for number in range(first, last + 1)]
    return names
