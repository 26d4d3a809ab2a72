"""All benchmarks, in the order in which they run and stand in the table. This is where a new one is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import commands, data, labs, launchers, logs, models, recovery, runs, services, training
from benchmarks.measure import Row


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: the names of its rows are its own, or begin with it and a slash."""

    name: str
    what: str
    rows: Callable[[], Iterator[Row]]


BENCHMARKS = (
    Benchmark("help", "CPU time of --help, beside other launchers", commands.help_time),
    Benchmark("generate", "CPU time of generate, beside another launcher's dry run", commands.generate_time),
    Benchmark("generate-1000", "generate for 1,000 nodes, and how it grows", commands.generate_many),
    Benchmark("data", "tokens from warm token files, and a large one opened", data.loading),
    Benchmark("prepare", "text into tokens, beside the tokenizer alone", models.prepared),
    Benchmark("export", "what memory the export of a large model takes", models.exported),
    Benchmark("lab-up-4", "four engines up and joined", labs.lab_up),
    Benchmark("first-step", "deploy to the first optimizer step", runs.first_step),
    Benchmark("launchers", "a job of three nodes to its first step by each launcher, beside the same tools by hand", launchers.first_steps),
    Benchmark("interrupted", "starts by each launcher that are interrupted, and what is left of them", launchers.interrupted),
    Benchmark("doctor-4", "doctor on four nodes, with its probe and all their links", runs.doctor),
    Benchmark("services-100", "a hundred services up and down", services.hundred),
    Benchmark("status-100", "status and plan of a run of a hundred services", services.status_and_plan),
    Benchmark("logs-100", "a hundred streams of output followed, through connections that are killed", logs.hundred_streams),
    Benchmark("recovery", "a container is killed, to the next step, beside plain torchrun", recovery.killed_container),
    Benchmark("scale", "a run scaled from two nodes to four, to the next step", recovery.planned_scale),
    Benchmark("checkpoint", "what a checkpoint in the background takes from training", training.background_checkpoint),
    Benchmark("logging", "what metrics and log take of a step", training.logging),
    Benchmark("train", "the trainer beside a loop by hand", training.by_hand),
    Benchmark("train-ddp", "two processes of it beside DistributedDataParallel by hand", training.by_hand_ddp),
    Benchmark("train-hf", "the trainer beside Hugging Face's", training.hugging_face),
    Benchmark("train-nanogpt", "the trainer beside nanoGPT's", training.nanogpt),
    Benchmark("train-whole", "a whole run, in terms of its steps", training.whole_run),
)
