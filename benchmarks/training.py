"""Compare the trainer with other training loops, in alternating steps: tokens per second of CPU time, with one thread per process.

Other load on the machine hardly affects CPU time: a step that waits for a core costs no more CPU time than one that does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import machine_description, third_party_tools
from benchmarks.measurement import BUILD, ROOT, BenchmarkRow, Sample, measure_in_turns_for, print_progress
from benchmarks.training_loop_processes import LoopProgram, SteppedLoop
from swarmtrain import process

_PLAIN_PYTORCH_TEXT = "the same model in a handwritten loop"
_THROUGHPUT_UNIT = "tokens/s of CPU"
_EARLIER_COMMIT = "70e22b19"
_SECONDS = 60.0
_EARLIER_STARTS, _EARLIER_SECONDS = 15, 20.0
"""How often both versions are started, and measured for how long: the speed of a process can differ by a percent from start to start."""
_BATCH_SIZE, _SEQUENCE_LENGTH = 8, 256
_FULL_RUN_STEPS = 30
_CHECKPOINT_COUNT = 10
_LOGGED_STEPS, _LOG_INTERVAL = 62, 10
_LLAMA_SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_layers": 8,
    "num_attention_heads": 8,
    "sequence_length": _SEQUENCE_LENGTH,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "mlp_factor": 3.0,
}
_GPT_SHAPE = {**_LLAMA_SHAPE, "norm_type": "layernorm", "mlp_type": "default", "mlp_factor": 4.0}
"""nanoGPT's shape, except for its learned position embeddings."""


def measure_plain_pytorch() -> Iterator[BenchmarkRow]:
    """Compare the throughput of the trainer in one process with that of a plain PyTorch loop with the same model."""
    for precision in ("float32", "bfloat16"):
        config = _build_config(_LLAMA_SHAPE, precision)
        yield _compare_loops(
            _build_row("train", precision, _PLAIN_PYTORCH_TEXT, 0.98),
            LoopProgram("swarmtrain_trainer", config),
            LoopProgram("plain_pytorch", config),
        )
    compiled_row = _mark_compiled(_build_row("train", "float32", f"{_PLAIN_PYTORCH_TEXT}, not compiled"), None)
    yield _compare_loops(
        compiled_row,
        LoopProgram("swarmtrain_trainer", _build_config(_LLAMA_SHAPE, "float32", compile=True)),
        LoopProgram("plain_pytorch", _build_config(_LLAMA_SHAPE, "float32")),
    )


def measure_plain_ddp() -> Iterator[BenchmarkRow]:
    """Compare the throughput of the trainer in two processes with that of a plain PyTorch loop with DistributedDataParallel."""
    for precision in ("float32", "bfloat16"):
        config = _build_config(_LLAMA_SHAPE, precision, micro_batch_size=_BATCH_SIZE // 2)
        row = _build_row(
            "train-ddp", precision, "the same model under handwritten DistributedDataParallel", 0.98, setup="two processes over gloo"
        )
        yield _compare_loops(row, LoopProgram("swarmtrain_trainer", config, 2), LoopProgram("plain_pytorch", config, 2))


def measure_earlier_version() -> Iterator[BenchmarkRow]:
    """Compare the throughput of the trainer with that of the commit before compression, learners and assignment by speed: all are off."""
    root = third_party_tools.check_out_commit(_EARLIER_COMMIT)
    for name, ranks, setup in (("train-earlier", 1, "one process"), ("train-earlier/ddp", 2, "two processes over gloo")):
        config = _build_config(_LLAMA_SHAPE, "float32", micro_batch_size=_BATCH_SIZE // ranks)
        row = _build_row(name, "float32", f"the trainer of commit {_EARLIER_COMMIT}", 0.995, setup=setup)
        programs = LoopProgram("swarmtrain_trainer", config, ranks), LoopProgram("swarmtrain_trainer", config, ranks, root=root)
        yield _compare_loops_over_starts(row, *programs)


def measure_hugging_face() -> Iterator[BenchmarkRow]:
    """Compare the throughput of the trainer with that of Hugging Face's Trainer with the Llama model of transformers."""
    python = str(third_party_tools.install_with_shared_packages(third_party_tools.TRANSFORMERS, third_party_tools.ACCELERATE))
    baseline_description = f"Hugging Face's Trainer, {third_party_tools.TRANSFORMERS.replace('==', ' ')}, a model of the same shape"
    for precision, goal, compiled_goal in (("float32", 1.0, None), ("bfloat16", 1.1, 1.2)):
        baseline = LoopProgram(
            "huggingface", _build_config(_LLAMA_SHAPE, precision), python=python, environment=third_party_tools.build_environment()
        )
        row = _build_row("train-hf", precision, baseline_description, goal)
        yield _compare_loops(row, LoopProgram("swarmtrain_trainer", _build_config(_LLAMA_SHAPE, precision)), baseline)
        yield _compare_loops(
            _mark_compiled(row, compiled_goal),
            LoopProgram("swarmtrain_trainer", _build_config(_LLAMA_SHAPE, precision, compile=True)),
            baseline,
        )


def measure_nanogpt() -> Iterator[BenchmarkRow]:
    """Compare the throughput of the trainer with that of nanoGPT's train.py, which does not support bfloat16 on a CPU."""
    environment = {"BENCH_NANOGPT": str(third_party_tools.clone_repository(third_party_tools.NANOGPT))}
    baseline = LoopProgram("nanogpt", _build_config(_GPT_SHAPE, "float32"), environment=environment)
    for precision, goal in (("float32", 1.0), ("bfloat16", 2.2)):
        row = _build_row("train-nanogpt", precision, "nanoGPT's train.py, float32", goal)
        yield _compare_loops(row, LoopProgram("swarmtrain_trainer", _build_config(_GPT_SHAPE, precision)), baseline)


def measure_full_run() -> Iterator[BenchmarkRow]:
    """Compare the throughput of a complete run, including checkpoint, metrics and log, with that of its median step."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _build_config(_LLAMA_SHAPE, "float32", train_iterations=_FULL_RUN_STEPS, save_dir=folder)
        argv = [sys.executable, "-m", "benchmarks.loops.full_run", config]
        output_line = process.run_command(argv, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT).splitlines()[-1]
    full_run_sample, step_sample = (
        Sample.from_values([_BATCH_SIZE * _SEQUENCE_LENGTH / float(seconds)]) for seconds in output_line.split()
    )
    row = _build_row("train-whole", "float32", "the median step of this run", 0.97)
    yield replace(
        row, description=f"{row.description}: {_FULL_RUN_STEPS} steps and a checkpoint", result=full_run_sample, baseline=step_sample
    )


def measure_async_checkpoint() -> Iterator[BenchmarkRow]:
    """Measure the stall of an asynchronous checkpoint, in ms, and its CPU time, in % of the interval that `save_interval: auto` selects."""
    from swarmtrain.trainer.checkpoint import save_interval

    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _build_config(_LLAMA_SHAPE, "float32", train_iterations=2 * _CHECKPOINT_COUNT, save_dir=folder, save_interval=2)
        argv = [sys.executable, "-m", "benchmarks.loops.checkpointing", config]
        output_lines = process.run_command(argv, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT).splitlines()
    timings = [tuple(map(float, line.split())) for line in output_lines if line[0].isdigit()][1:]  # the first one allocates its memory
    model_text = "of a model of 9M parameters, one process"
    yield BenchmarkRow(
        "checkpoint/stall",
        f"time for which training stalls during a checkpoint {model_text}",
        "ms",
        Sample.from_values([1e3 * stalled_seconds for stalled_seconds, _ in timings]),
    )
    share = Sample.from_values([100 * cpu / save_interval.compute_auto_interval(stalled_seconds, cpu) for stalled_seconds, cpu in timings])
    description = f"CPU time of a background save {model_text}, as a fraction of that between two saves of `save_interval: auto`"
    yield BenchmarkRow("checkpoint", description, "%", share, limit=1)


def measure_logging() -> Iterator[BenchmarkRow]:
    """Measure the logging time, including metrics on disk, in % of a step's time and in ms per step, with the trainer's step timer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _build_config(_LLAMA_SHAPE, "float32", train_iterations=_LOGGED_STEPS, save_dir=folder, save_interval=None)
        process.run_command([sys.executable, "-m", "benchmarks.loops.full_run", config], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    logged_times = [(line["logging_seconds"], line["step_seconds"]) for line in lines if "logging_seconds" in line][1:]
    spans = [logged_times[first : first + _LOG_INTERVAL] for first in range(0, len(logged_times) - _LOG_INTERVAL + 1, _LOG_INTERVAL)]
    share = Sample.from_values([100 * sum(logged for logged, _ in span) / sum(step for _, step in span) for span in spans])
    logging_times = Sample.from_values([1e3 * logged for logged, _ in logged_times])
    description = "fraction of a step's time for logging to disk, the log and sinks; a model of 9M parameters, one process"
    yield BenchmarkRow(
        "logging", description, "%", share, limit=0.5, note=f"a line is logged every {_LOG_INTERVAL} steps, metrics are written at each"
    )
    yield BenchmarkRow("logging/step", "logging time per step", "ms", logging_times)


def _build_row(
    benchmark: str, precision: str, baseline_description: str, goal: float | None = None, setup: str = "one process"
) -> BenchmarkRow:
    name = benchmark if precision == "float32" else f"{benchmark}/{precision}"
    description = f"`train`, 9M parameters, {_BATCH_SIZE} × {_SEQUENCE_LENGTH} tokens, {precision}, {setup}"
    return BenchmarkRow(name, description, _THROUGHPUT_UNIT, baseline_description=baseline_description, goal=goal)


def _mark_compiled(row: BenchmarkRow, goal: float | None) -> BenchmarkRow:
    return replace(row, name=f"{row.name}/compiled", description=f"{row.description}, trainer.compile", goal=goal)


def _compare_loops(row: BenchmarkRow, program: LoopProgram, baseline_program: LoopProgram) -> BenchmarkRow:
    """Return `row` with the measurements of both programs."""
    if "/bfloat16" in row.name and not machine_description.has_bfloat16():
        return replace(row, skip_reason="this processor does not support bfloat16")
    result, baseline = _measure_in_one_start((program, baseline_program), _SECONDS)
    return replace(row, result=result, baseline=baseline, note=f"{len(result.values)} pairs of steps")


def _compare_loops_over_starts(row: BenchmarkRow, program: LoopProgram, baseline_program: LoopProgram) -> BenchmarkRow:
    """Return `row` with the medians of both programs in each of many starts. Each program is the first to start in every other one."""
    medians = []
    for start in range(_EARLIER_STARTS):
        direction = 1 if start % 2 == 0 else -1
        samples = _measure_in_one_start((program, baseline_program)[::direction], _EARLIER_SECONDS)
        result, baseline = (sample.median for sample in samples[::direction])
        medians.append((result, baseline))
        print_progress(f"start {start + 1} of {_EARLIER_STARTS}: {result / baseline:.4f}")
    results, baselines = map(Sample.from_values, zip(*medians, strict=True))
    return replace(row, result=results, baseline=baselines, note=f"medians of {_EARLIER_STARTS} starts")


def _measure_in_one_start(programs: Sequence[LoopProgram], seconds: float) -> Sequence[Sample]:
    """Start two programs, and return the tokens per second of CPU of their steps, which they run in turns for `seconds`."""
    with SteppedLoop(programs[0]) as first, SteppedLoop(programs[1]) as second:
        for loop in (first, second):
            loop.measure_step_seconds(2)  # warm-up, with all one-time work
        return measure_in_turns_for(seconds, *(partial(_measure_tokens_per_second, loop) for loop in (first, second)))


def _measure_tokens_per_second(stepped_loop: SteppedLoop) -> float:
    return _BATCH_SIZE * _SEQUENCE_LENGTH / stepped_loop.measure_step_seconds(1)


def _build_config(architecture: dict[str, Any], precision: str, micro_batch_size: int = _BATCH_SIZE, **trainer_settings: Any) -> str:
    return json.dumps(
        {
            "topology": {"global_batch_size": _BATCH_SIZE, "micro_batch_size": micro_batch_size},
            "learning_rate_scheduler": {"learning_rate": 1e-3},
            "trainer": {"train_iterations": 1_000_000, **trainer_settings},
            "transformer_architecture": {**architecture, "precision": precision},
            "data": {"data_prefixes": [str(_write_tokens())]},
        }
    )


def _write_tokens() -> Path:
    """Write a file of about 2 million random tokens, unless it exists, and return its prefix."""
    import numpy as np

    from swarmtrain.trainer.data import memory_map

    prefix = BUILD / "tokens"
    if not prefix.with_name("tokens.meta.json").exists():
        documents = np.random.default_rng(0).integers(8192, size=(8, 2**18))
        memory_map.write_token_files(prefix, documents, "uint16")
    return prefix
