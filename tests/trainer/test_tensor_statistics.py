"""Tensor statistics: correct, those of the full tensor under every sharding, and without effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import LocalWorld, merge_config, read_losses, run_training

from swarmtrain.config.schema.tensor_statistics import Statistic
from swarmtrain.trainer.metrics import tensor_stats

ALL_STATISTICS = [str(one) for one in Statistic]
RECORDER: dict[str, Any] = {
    "interval": 4,
    "statistics": [["embedding", ["mean"]], ["*", ALL_STATISTICS]],
    "kinds": ["weights", "activations", "gradients", "activation_gradients"],
    "include_module_type": True,
}


def compute_tensor_statistics(tensor: torch.Tensor, dtype: torch.dtype = torch.float32, chunks: int = 1) -> dict[str, Any]:
    row, counts = tensor_stats.create_empty_partial_statistics(), torch.zeros(tensor_stats.BIN_COUNT, dtype=torch.int64)
    for part in tensor.chunk(chunks):
        row, counts = (
            tensor_stats.merge_partial_statistics(row, tensor_stats.compute_partial_statistics(part, dtype)),
            counts + tensor_stats.compute_histogram(part),
        )
    return tensor_stats.compute_statistics(row, list(Statistic), counts)


@pytest.mark.parametrize("chunks", [1, 7])
def test_statistics_are_those_of_torch(chunks: int) -> None:
    numbers = torch.randn(10_007, generator=torch.Generator().manual_seed(1)) * 3 + 1
    found, wide, size = compute_tensor_statistics(numbers, chunks=chunks), numbers.double(), numbers.double().abs()
    central = wide - wide.mean()
    exact = {
        "mean": wide.mean(),
        "std": wide.std(),
        "l1": size.mean(),
        "abs_std": size.std(),
        "norm": wide.norm(),
        "skew": (central / wide.std()).pow(3).mean(),
        "kurtosis": (central / wide.std(correction=0)).pow(4).mean() - 3,
        "max": wide.max(),
        "min": wide.min(),
        "abs_max": size.max(),
        "abs_min": size.min(),
        "norm_sparsity": wide.numel() ** 0.5 * wide.norm() / size.sum(),
    }
    assert {name: found[name] for name in exact} == pytest.approx({name: float(value) for name, value in exact.items()}, rel=1e-12)
    rounded = {"median": wide.median(), "abs_median": size.median()}
    for percent in (1, 10, 25, 75, 90, 99):
        rounded |= {f"quantile_{percent}": wide.quantile(percent / 100), f"abs_quantile_{percent}": size.quantile(percent / 100)}
    assert {name: found[name] for name in rounded} == pytest.approx({name: float(value) for name, value in rounded.items()}, rel=0.02)


def test_numbers_that_hardly_differ_do_not_cancel_out() -> None:
    numbers = 1 + 1e-5 * torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    central = numbers - numbers.mean()
    assert compute_tensor_statistics(numbers, chunks=3)["kurtosis"] == pytest.approx(
        float(central.pow(4).mean() / central.square().mean() ** 2 - 3), rel=1e-6
    )


def test_values_outside_the_range_of_a_dtype_are_counted() -> None:
    numbers = torch.tensor([0.0, 1e-9, -1e-9, 1.0, 1e5, float("inf"), float("-inf"), float("nan")])
    found = compute_tensor_statistics(numbers, torch.float16)
    shares = {"zero": 1, "underflow": 2, "overflow": 1, "posinf": 1, "neginf": 1, "nan": 1, "underflow_e4m3": 2, "underflow_e5m2": 2}
    assert {name: found[f"pct_{name}"] for name in shares} == {name: share / 8 for name, share in shares.items()}
    assert (found["non_finite"], found["max"], found["min"]) == (3, pytest.approx(1e5), pytest.approx(-1e-9))
    for narrow, name in ((torch.float8_e4m3fn, "pct_underflow_e4m3"), (torch.float8_e5m2, "pct_underflow_e5m2")):
        near = 2.0 ** torch.arange(-20, 0, 0.125)
        assert compute_tensor_statistics(near)[name] == float((near.to(narrow).float() == 0).double().mean())
    assert compute_tensor_statistics(torch.tensor([float("nan")]))["max"] is None, "JSON has no word for what is not there"


def read_lines(folder: Path) -> dict[tuple[int, str, str], dict[str, Any]]:
    text = (folder / "run" / "tensor-statistics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    by_name = {(line["step"], line["kind"], line["name"]): line for line in found}
    assert len(by_name) == len(found), "each once"
    return by_name


@pytest.fixture(scope="module")
def single_rank_run(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_training(folder, build_recording_config(config))
    return folder


def build_recording_config(config: dict[str, Any]) -> dict[str, Any]:
    return merge_config(config, trainer={"tensor_statistics_recorder_config": RECORDER}, transformer_architecture={"num_layers": 4})


def test_they_leave_no_trace_in_training(tmp_path: Path, config: dict[str, Any], single_rank_run: Path) -> None:
    recorder = {"tensor_statistics_recorder_config": None}
    assert run_training(tmp_path, merge_config(build_recording_config(config), trainer=recorder)) == read_losses(single_rank_run)
    assert not (tmp_path / "run" / "tensor-statistics.jsonl").exists()


def test_a_line_for_every_tensor(single_rank_run: Path) -> None:
    found = read_lines(single_rank_run)
    assert {step for step, _, _ in found} == {4, 8, 12}
    attention = "blocks.3.attention.query"
    assert {kind for step, kind, name in found if name.startswith(attention)} == set(RECORDER["kinds"])
    embedding = found[4, "activations", "embedding"]
    assert set(embedding) == {"step", "name", "kind", "type", "count", "mean"}, "the first glob that matches"
    query = found[4, "activations", attention]
    assert (query["type"], query["count"]) == ("FunctionalLinear", 12 * 32 * 32), "all micro batches"
    assert found[12, "weights", f"{attention}.weight"]["norm"] != found[4, "weights", f"{attention}.weight"]["norm"]


@pytest.mark.test_all_only("three topologies; the gate has the statistics of one process")
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"topology": {"data_parallel_type": "fsdp"}}),
        (2, {"topology": {"pipe_parallel_size": 2, "pipe_stages_per_rank": 2, "activation_checkpointing_type": "every_pipe_stage"}}),
        (4, {"topology": {"model_parallel_size": 2, "activation_checkpointing_type": "every_layer"}, "optimizer": {"zero": True}}),
    ],
    ids=["fsdp", "pipe", "tensor x zero, recomputed"],
)
def test_statistics_of_a_sharded_model_are_those_of_the_whole(
    tmp_path: Path, config: dict[str, Any], single_rank_run: Path, size: int, changes: dict[str, Any]
) -> None:
    divided = merge_config(
        build_recording_config(config), **changes, trainer={**build_recording_config(config)["trainer"], "train_iterations": 4}
    )
    world = LocalWorld(tmp_path, divided, size)
    assert world.wait() == [0] * size, world.read_log()
    whole = {key: line for key, line in read_lines(single_rank_run).items() if key[0] == 4}
    parts = read_lines(tmp_path)
    assert parts.keys() == whole.keys()
    for key, line in whole.items():
        if key[1] in ("weights", "gradients"):
            assert parts[key]["count"] == line["count"], key
        # If a gradient is zero except for rounding, the rounding differs with the order of sums.
        for name in ("mean", "std", "abs_max", "median", *(() if "gradient" in key[1] else ("pct_zero",))):
            if name in line:
                assert parts[key][name] == pytest.approx(line[name], rel=0.01, abs=1e-6), (key, name)
