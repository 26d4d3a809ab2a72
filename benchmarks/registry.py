"""Registry of all benchmarks, in the order in which they run and appear in the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import (
    cli_commands,
    costs,
    data,
    heartbeats,
    host_time,
    idle_services,
    lab_startup,
    launchers,
    learning_curves,
    logs,
    models,
    preemption,
    queue_scheduler,
    rank_store,
    recovery,
    resume,
    run_startup,
    simulated_nodes,
    slow_network,
    step_estimates,
    training,
    unequal_nodes,
)
from benchmarks.measurement import BenchmarkRow


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Its rows are named NAME or NAME/…, where NAME is the benchmark's name."""

    name: str
    description: str
    measure_rows: Callable[[], Iterator[BenchmarkRow]]


BENCHMARKS = (
    Benchmark("help", "CPU time of --help, against other launchers", cli_commands.measure_help),
    Benchmark("generate", "CPU time of generate, against another launcher's dry run", cli_commands.measure_generate),
    Benchmark("generate-1000", "generate for 1,000 nodes, and how it grows", cli_commands.measure_generate_for_1000_nodes),
    Benchmark("data", "loading tokens from cached files, and opening a large file", data.measure_data_loading),
    Benchmark("prepare", "text to tokens, against the tokenizer alone", models.measure_tokenization),
    Benchmark("export", "peak memory of the export of a large model", models.measure_export),
    Benchmark("lab-up-4", "start of a lab with four engines", lab_startup.measure_lab_up),
    Benchmark("first-step", "deploy to the first optimizer step", run_startup.measure_first_step),
    Benchmark(
        "launchers",
        "time to a three-node job's first step by launcher, against the launcher's own commands",
        launchers.measure_first_steps,
    ),
    Benchmark("interrupted", "remaining objects after interrupted starts, by launcher", launchers.measure_interrupted_starts),
    Benchmark("doctor-4", "doctor on four nodes, with its probe and all their links", run_startup.measure_doctor),
    Benchmark("services-100", "deployment and removal of 100 services", idle_services.measure_services),
    Benchmark("missing-machine", "deploy with one of four machines powered off", idle_services.measure_missing_machine),
    Benchmark("status-100", "status and plan of a run of 100 services", idle_services.measure_status_and_plan),
    Benchmark("ps-100", "the table of 25 runs of four services", idle_services.measure_run_table),
    Benchmark("queue", "a decision of the queue's scheduler, and its CPU time with 100 runs", queue_scheduler.measure_scheduler),
    Benchmark("preemption", "an urgent run on a full cluster, to its first step, against Slurm", preemption.measure_preemption),
    Benchmark("slow", "tokens per second on two nodes with slow links, against plain DDP", slow_network.measure_slow_network),
    Benchmark("unequal", "tokens per second on three nodes of different speed, against their sum", unequal_nodes.measure_unequal_nodes),
    Benchmark("curves", "validation losses of PowerSGD and DiLoCo, against data parallelism", learning_curves.measure_learning_curves),
    Benchmark(
        "estimates", "plan's estimates of the time per step, against runs over links of three speeds", step_estimates.measure_step_estimates
    ),
    Benchmark("logs-100", "100 streams of output followed, through connections that are killed", logs.measure_log_streams),
    Benchmark("heartbeat", "a signed heartbeat, against an unsigned one", heartbeats.measure_signed_heartbeats),
    Benchmark("nodes-1000", "join, loss and rescue of 1,000 simulated nodes", simulated_nodes.measure_simulated_nodes),
    Benchmark("rank-store", "the ranks' store of a run with a key, against a bare TCPStore", rank_store.measure_rank_store),
    Benchmark("recovery", "from a killed container to the next step, against plain torchrun", recovery.measure_recovery),
    Benchmark("scale", "a run scaled from two nodes to four, to the next step", recovery.measure_scaling_time),
    Benchmark("resume", "from a checkpoint on disk to a model that is ready to train, against reading the files", resume.measure_resume),
    Benchmark("checkpoint", "cost of a background checkpoint for training", training.measure_async_checkpoint),
    Benchmark("logging", "time per step for metrics and logging", training.measure_logging),
    Benchmark("train", "the trainer against a plain PyTorch loop", training.measure_plain_pytorch),
    Benchmark("train-ddp", "two processes, against plain DistributedDataParallel", training.measure_plain_ddp),
    Benchmark("train-earlier", "the trainer against its version before options for slow networks", training.measure_earlier_version),
    Benchmark("train-hf", "the trainer against Hugging Face's", training.measure_hugging_face),
    Benchmark("train-nanogpt", "the trainer against nanoGPT's", training.measure_nanogpt),
    Benchmark("train-whole", "overhead of a complete run, relative to its steps", training.measure_full_run),
    Benchmark(
        "tensor-parallel", "host time of a tensor-parallel layer, against one that is not sharded", host_time.measure_layer_host_time
    ),
    Benchmark("costs", "kernels, casts, waits and bytes of a step on a GPU, against torchtitan's model", costs.measure_costs),
)
