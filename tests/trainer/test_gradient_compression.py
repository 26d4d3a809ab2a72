"""Compressed sums of gradients: what is rounded, what is sent, and which runs are equal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import (
    LocalWorld,
    compute_deviation,
    merge_config,
    read_losses,
    read_manifest,
    read_validation_losses,
    run_training,
)

from benchmarks.counting.swarmtrain_step import count_step_costs
from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import PowerSgdConfig
from swarmtrain.trainer.parallel.gradient_compression import bfloat16, powersgd

POWERSGD = {"gradient_compression": "powersgd", "powersgd": {"matrix_approximation_rank": 2, "start_step": 3}}
BF16 = {"gradient_compression": "bf16"}
RESET = "the error feedback of gradient compression is reset"


def check_gradients(folder: Path, config: dict[str, Any], ranks: int) -> None:
    clipped = merge_config(config, optimizer={"gradient_clipping": 1e-3})
    world = LocalWorld(folder, clipped, ranks, script="compressed_gradients")
    assert world.wait() == [0] * ranks, world.read_log()
    assert world.read_log().count("the gradients are as expected") == ranks


@pytest.mark.parametrize(
    ("ranks", "batch", "precision"),
    [(2, 4, "float32"), (3, 8, "float32"), (3, 4, "bfloat16")],
    ids=["two sums", "uneven accumulation", "one rank idle"],
)
def test_bf16_rounds_the_sums_of_each_replica_and_their_total(
    tmp_path: Path, config: dict[str, Any], ranks: int, batch: int, precision: str
) -> None:
    """Bit for bit, and clipped by the norm of the rounded sums."""
    topology = {"global_batch_size": batch, **BF16}
    check_gradients(tmp_path, merge_config(config, topology=topology, transformer_architecture={"precision": precision}), ranks)


@pytest.mark.parametrize(("ranks", "precision"), [(3, "float32"), (2, "bfloat16")])
def test_powersgd_sums_projections_and_keeps_what_they_miss(tmp_path: Path, config: dict[str, Any], ranks: int, precision: str) -> None:
    """With the same projection in each replica; vectors are summed exactly, and all are clipped by the norm of the approximation."""
    settings = {**POWERSGD, "powersgd": {"matrix_approximation_rank": 2, "start_step": 0}, "global_batch_size": 8}
    check_gradients(tmp_path, merge_config(config, topology=settings, transformer_architecture={"precision": precision}), ranks)


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        (BF16, 3),
        (POWERSGD, 3),
        *(
            pytest.param({**mode, **split}, 4, marks=pytest.mark.test_all_only("other topologies"))
            for mode in (BF16, POWERSGD)
            for split in ({"model_parallel_size": 2}, {"pipe_parallel_size": 2})
        ),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, config: dict[str, Any], topology: dict[str, Any], ranks: int) -> None:
    """With as many ranks; with powersgd also the error feedback, which the files of the last checkpoint contain."""
    base = merge_config(config, topology=topology, trainer={"eval_interval": 4})
    once = run_training(tmp_path / "once", base, ranks)
    run_training(tmp_path / "twice", merge_config(base, trainer={"train_iterations": 6}), ranks)
    twice = run_training(tmp_path / "twice", base, ranks)
    assert twice == once
    assert read_validation_losses(tmp_path / "twice").items() >= read_validation_losses(tmp_path / "once").items()
    manifest = read_manifest(tmp_path / "twice", 12)
    assert manifest["files"] == read_manifest(tmp_path / "once", 12)["files"]
    errors = {name.split("/")[1] for name in manifest["tensors"] if name.startswith("rank_state/") and "/error/" in name}
    uses_powersgd = topology["gradient_compression"] == "powersgd"
    assert errors == ({f"{rank}-of-{ranks}" for rank in range(ranks)} if uses_powersgd else set())
    assert manifest["state"]["reproducibility"].startswith("losses are equal after a restart")
    assert RESET not in (tmp_path / "twice" / "rank-0.log").read_text()


@pytest.mark.test_all_only("two long training runs; make bench has the learning curves")
def test_the_loss_falls_with_powersgd_as_with_exact_sums(tmp_path: Path, config: dict[str, Any]) -> None:
    """And is the same up to start_step, after which it is not."""
    longer = merge_config(config, trainer={"train_iterations": 240}, learning_rate_scheduler={"learning_rate_decay_iters": 240})
    settings = {"gradient_compression": "powersgd", "powersgd": {"matrix_approximation_rank": 4, "start_step": 24}}
    exact = run_training(tmp_path / "exact", longer, 2)
    approximate = run_training(tmp_path / "approximate", merge_config(longer, topology=settings), 2)
    assert [exact[step] for step in range(1, 26)] == [approximate[step] for step in range(1, 26)]
    assert exact[27] != approximate[27]
    last, last_approximate = (read_validation_losses(tmp_path / name)[240] for name in ("exact", "approximate"))
    assert last < 0.3 * exact[1], "a model that learns little is equal to anything"
    assert abs(last_approximate - last) < 0.05 * last


@pytest.mark.parametrize("split", [{}, {"pipe_parallel_size": 2}], ids=["replicas", "pipelines"])
def test_bf16_follows_exact_sums(tmp_path: Path, config: dict[str, Any], split: dict[str, int]) -> None:
    exact = run_training(tmp_path / "exact", config, 2)
    ranks = 4 if split else 2
    rounded = run_training(tmp_path / "rounded", merge_config(config, topology={**BF16, **split}), ranks)
    assert exact[1] == pytest.approx(rounded[1], rel=1e-6)
    assert 1e-6 < compute_deviation(exact, rounded) < 0.01


def test_another_world_size_resets_the_error_feedback_and_logs_it(tmp_path: Path, config: dict[str, Any]) -> None:
    """From 2 to 3 ranks, and then to one, which compresses nothing."""
    base = merge_config(config, topology=POWERSGD)
    run_training(tmp_path, merge_config(base, trainer={"train_iterations": 6}), 2)
    run_training(tmp_path, merge_config(base, trainer={"train_iterations": 9}), 3)
    assert f"{RESET}: the checkpoint is of 2 ranks, and this world has 3" in (tmp_path / "rank-0.log").read_text()
    assert {name.split("/")[1] for name in read_manifest(tmp_path, 9)["tensors"] if name.startswith("rank_state/")} == {
        f"{rank}-of-3" for rank in range(3)
    }
    run_training(tmp_path, base, 1)
    assert f"{RESET}: the checkpoint is of 3 ranks, and this world has 1" in (tmp_path / "rank-0.log").read_text()
    assert not any(name.startswith("rank_state/") for name in read_manifest(tmp_path, 12)["tensors"])
    losses = read_losses(tmp_path)
    assert losses[12] < losses[1]


def test_disks_of_single_nodes_hold_no_error_feedback(tmp_path: Path, config: dict[str, Any]) -> None:
    """Each node's checkpoint is complete without the other node; a restart resets the error feedback, and logs it."""
    base = merge_config(config, topology=POWERSGD)
    for steps in (6, 12):
        world = LocalWorld(tmp_path, merge_config(base, trainer={"train_iterations": steps}), 2, nodes=("a", "b"))
        assert world.wait() == [0, 0], world.read_log()
    assert f"{RESET}: the checkpoint has none" in world.read_log()
    manifest = json.loads((tmp_path / "run" / "a" / "step-00000012" / "manifest.json").read_text())
    assert not any(name.startswith("rank_state/") for name in manifest["tensors"])


def test_a_skipped_step_leaves_no_nan_in_the_error_feedback(tmp_path: Path, config: dict[str, Any]) -> None:
    skipping = merge_config(config, topology=POWERSGD, trainer={"non_finite": "skip"})
    world = LocalWorld(tmp_path, skipping, 2, script="nan_losses")
    assert world.wait() == [0, 0], world.read_log()
    assert world.read_log().count("skipped: the loss is") == 1
    assert read_validation_losses(tmp_path)[12] < read_validation_losses(tmp_path)[0]


class Ranks:
    """Ranks that run in threads, with their own collectives: a process group, and what torch.distributed would do with it."""

    def __init__(self, count: int) -> None:
        self._count, self._barrier, self._local = count, threading.Barrier(count), threading.local()
        self._tensors: list[torch.Tensor] = [torch.empty(0)] * count
        self.message_elements: list[int] = []
        """Number of values that each call of all_to_all_single sends to a rank."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what `function` returns on each rank."""

        def run_rank(rank: int) -> Any:
            self._local.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(run_rank, range(self._count)))

    def size(self) -> int:
        return self._count

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> Ranks:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))
        return self

    def all_to_all_single(self, output: torch.Tensor, values: torch.Tensor, **_: Any) -> Ranks:
        self.message_elements.append(len(values) // self._count)
        parts = [each.view(self._count, -1)[self._local.rank] for each in self._exchange(values)]
        output.copy_(torch.cat(parts))
        return self

    def wait(self) -> None:
        """Do nothing: each collective waits."""

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[self._local.rank] = tensor.clone()
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


def test_bf16_sends_large_gradients_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of three replicas are the same as those of all values at once, bit for bit."""
    replicas, random = Ranks(3), torch.Generator().manual_seed(1)
    monkeypatch.setattr(bfloat16, "dist", replicas)
    monkeypatch.setattr(bfloat16, "_PART_ELEMENTS", 8)
    weights = [nn.Parameter(torch.zeros(size)) for size in (100, 1, 23, 24)]
    gradients = [[torch.randn(weight.shape, generator=random) for weight in weights] for _ in range(3)]

    def run_step(replica: int) -> list[torch.Tensor]:
        compressor = bfloat16.Bfloat16Compression(replicas)  # type: ignore[arg-type]  # see Ranks
        sums = [gradient.clone() for gradient in gradients[replica]]
        for group in (slice(0, 3), slice(3, 4)):
            compressor.start_sum(dict(zip(weights[group], sums[group], strict=True)))
        compressor.finish_sums()
        return sums

    rounded = [[gradient.bfloat16().float() for gradient in each] for each in gradients]
    expected = [(first + second + third).bfloat16().float() for first, second, third in zip(*rounded, strict=True)]
    for sums in replicas.run(run_step):
        assert all(torch.equal(mine, total) for mine, total in zip(sums, expected, strict=True))
    assert sorted(replicas.message_elements) == sorted(3 * 2 * [*[8] * 5, 2, 8])


def sum_by_powersgd(
    monkeypatch: pytest.MonkeyPatch, rank: int, gradients: Sequence[Sequence[torch.Tensor]]
) -> list[tuple[list[torch.Tensor], list[float]]]:
    """Sum `gradients`, for each replica and step. Return for each replica its sums, and the norm of its error, after each step."""
    replicas = Ranks(len(gradients))
    monkeypatch.setattr(powersgd, "dist", replicas)

    def run_steps(replica: int) -> tuple[list[torch.Tensor], list[float]]:
        weight, sums, errors = nn.Parameter(torch.zeros(gradients[0][0].shape)), [], []
        config = PowerSgdConfig(matrix_approximation_rank=rank, start_step=0)
        compressor = powersgd.PowerSgdCompression({"weight": weight}, replicas, config, seed=1)  # type: ignore[arg-type]  # see Ranks
        for gradient in gradients[replica]:
            sums.append(gradient.clone())
            compressor.start_sum({weight: sums[-1]})
            compressor.finish_sums()
            errors.append(float(compressor.collect_state_tensors()["error/weight"].norm()))
        return sums, errors

    return replicas.run(run_steps)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_recovers_from_gradients_of_zeros(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """torch's hook returns NaN or zeros in all steps after a gradient of zeros, with a rank of 1 or 2."""
    outer = torch.outer(torch.linspace(-1, 1, 32), torch.linspace(1, 2, 48))
    [(sums, _)] = sum_by_powersgd(monkeypatch, rank, [[torch.zeros(32, 48), outer, outer]])
    torch.testing.assert_close(sums[-1], outer, rtol=1e-3, atol=1e-3)


def test_the_error_of_a_replica_stays_bounded_if_replicas_have_different_numbers_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's hook, the errors grow with each step. What is not sent in a step is sent in later steps."""
    random = torch.Generator().manual_seed(1)
    mean = torch.randn(32, 48, generator=random)
    gradients = [[weight * mean + 0.1 * torch.randn(32, 48, generator=random) for _ in range(400)] for weight in (2, 1, 0)]
    results = sum_by_powersgd(monkeypatch, 4, gradients)
    for sums, errors in results:
        assert all(torch.equal(mine, first) for mine, first in zip(sums, results[0][0], strict=True)), "all replicas have the same sums"
        assert max(errors[200:]) < 1.5 * max(errors[:200])
    exact = torch.stack([torch.stack(each).sum(0) for each in gradients]).sum(0)
    assert float((torch.stack(results[0][0]).sum(0) - exact).norm()) < 0.05 * float(exact.norm())


def count_sent_bytes(topology: dict[str, Any], precision: str, ranks: int, micro_batches: int) -> float:
    """Return the number of bytes that a rank sends in the passes of a step."""
    batch = {"global_batch_size": micro_batches * ranks, "micro_batch_size": 1}
    architecture = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 2, "sequence_length": 16}
    config = {
        "topology": {**batch, **topology},
        "transformer_architecture": {**architecture, "precision": precision, "norm_type": "rms"},
        "trainer": {"deterministic": "ignore"},
    }
    return float(asdict(count_step_costs(Config.from_json(json.dumps(config)), ranks)[0])["bytes_sent"])


@pytest.mark.parametrize(("precision", "fraction"), [("float32", 1 / 4), ("bfloat16", 1 / 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_sends_half_the_bytes_of_float32_sums_and_a_quarter_of_float64_sums(precision: str, fraction: float, ranks: int) -> None:
    exact = count_sent_bytes({}, precision, ranks, 2)
    rounded = count_sent_bytes(BF16, precision, ranks, 2)
    assert exact > 1e5
    assert rounded == pytest.approx(fraction * exact, rel=1e-3)


def test_powersgd_sends_the_factors_of_matrices_and_the_vectors() -> None:
    settings = {"gradient_compression": "powersgd", "powersgd": {"matrix_approximation_rank": 4, "start_step": 0}}
    sent = count_sent_bytes(settings, "float32", 2, 2)
    matrices = [(512, 64), *[(64, 64)] * 8, *[(256, 64), (64, 256)] * 2]
    factors, vectors = sum(4 * (rows + columns) for rows, columns in matrices), 5 * 64
    assert sent == 4 * factors + 8 * vectors
    assert sent < 0.06 * count_sent_bytes({}, "float32", 2, 2)
