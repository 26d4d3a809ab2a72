"""AdamW, SGD and Muon, compared with torch's own and with formulas; and loading a checkpoint of another optimizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import LocalWorld, compute_deviation, merge_config, read_manifest, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.optimizer import OptimizerConfig, OptimizerMethod
from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer import start_runtime
from swarmtrain.trainer.checkpoint.compatibility import select_tensors_to_load
from swarmtrain.trainer.optim.muon import Muon, assign_matrices_to_replicas, orthogonalize_matrix
from swarmtrain.trainer.optim.param_groups import build_parameter_groups, choose_optimizer_method
from swarmtrain.trainer.optim.update_rules import AdamW, Sgd, UpdateRule
from swarmtrain.trainer.parallel.shard_layout import ShardLayout

RATES = [0.1, 0.05, 0.2, 0.0, 0.1]
DECAY = 0.03


@pytest.fixture(scope="module")
def single_rank_mesh() -> Iterator[DeviceMesh]:
    """The mesh of a world of one rank."""
    with start_runtime(Config()):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))


def build_optimizer_config(**options: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate_json(json.dumps(options))


def draw_parameters() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in (("wide", (6, 32)), ("tall", (40, 8)))}


def run_updates(parameters: Mapping[str, nn.Parameter], step: Callable[[int, float], object], mesh: DeviceMesh | None = None) -> list[Any]:
    """Make five steps with the gradients of a made-up run, and return the resulting parameters."""
    random = torch.Generator().manual_seed(6)
    for number, rate in enumerate(RATES, start=1):
        for parameter in parameters.values():
            slope = torch.randn(parameter.shape, generator=random)
            parameter.grad = distribute_tensor(slope, mesh, [Shard(0)]) if mesh else slope
        with torch.no_grad():
            step(number, rate)
    return [parameter.detach() for parameter in parameters.values()]


def reset_state(rule: UpdateRule) -> UpdateRule:
    """Set the state of `rule` to that at the start of a run, as the optimizer does."""
    for state in rule.moments.values():
        for tensor in state.values():
            tensor.zero_()
    return rule


def run_ours(make: Callable[[Mapping[str, nn.Parameter]], UpdateRule], decay: float = DECAY) -> list[Tensor]:
    parameters = draw_parameters()
    update_rule = reset_state(make(parameters))
    return run_updates(parameters, lambda number, rate: update_rule.step(number, rate, decay))


def run_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    parameters = draw_parameters()
    optimizer = make(list(parameters.values()))

    def step(number: int, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    return run_updates(parameters, step)


def build_adamw(parameters: Mapping[str, nn.Parameter], **options: object) -> AdamW:
    return AdamW(parameters, build_optimizer_config(**options), {name: parameter.shape for name, parameter in parameters.items()})


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_adamw_is_torchs() -> None:
    """With the fused kernel if it gives the same for any division of rows, and without it otherwise."""

    def theirs(mine: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [parameter], "fused": fused} for parameter, fused in zip(mine, (True, False), strict=True)]
        return torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, weight_decay=DECAY)

    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    assert are_equal(run_ours(lambda mine: build_adamw(mine, **options)), run_torch(theirs))
    assert not are_equal(run_ours(lambda mine: build_adamw(mine, **options), decay=0.0), run_torch(theirs))


@pytest.mark.parametrize("shape", [(128,), (50, 32), (64, 20)], ids=str)
def test_an_update_is_the_same_however_rows_are_divided(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    before, slopes = torch.randn(shape, generator=random), torch.randn((50, *shape), generator=random)

    def update_in_chunks(chunks: int) -> Tensor:
        return torch.cat([update_chunk(*each) for each in zip(before.chunk(chunks), slopes.chunk(chunks, dim=1), strict=True)])

    def update_chunk(part: Tensor, slopes: Tensor) -> Tensor:
        parameter = nn.Parameter(part.clone())
        made = reset_state(AdamW({"it": parameter}, build_optimizer_config(), {"it": before.shape}))
        for number, slope in enumerate(slopes, start=1):
            parameter.grad = slope.clone()
            with torch.no_grad():
                made.step(number, 1e-3, DECAY)
        return parameter.detach()

    assert all(torch.equal(update_in_chunks(1), update_in_chunks(parts)) for parts in (2, 3, 5))


def test_adamw_with_bfloat16_state_computes_in_float32_and_rounds_its_state() -> None:
    exact, coarse = draw_parameters(), draw_parameters()
    fine, rounded = (reset_state(each) for each in (build_adamw(exact), build_adamw(coarse, state_precision="bfloat16")))
    for mine, made in ((exact, fine), (coarse, rounded)):
        mine["wide"].grad, mine["tall"].grad = torch.full((6, 32), 0.3), torch.full((40, 8), -0.01)
        with torch.no_grad():
            made.step(1, 0.1, DECAY)
    assert all(torch.equal(exact[name], coarse[name]) for name in exact), "the first step starts from no state"
    for kind, state in rounded.moments.items():
        assert all(torch.equal(kept, fine.moments[kind][name].bfloat16()) for name, kept in state.items())
    later = [run_ours(lambda mine, kept=kept: build_adamw(mine, state_precision=kept)) for kept in ("float32", "bfloat16")]
    worst = max(float((left - right).abs().max()) for left, right in zip(*later, strict=True))
    assert 0 < worst < 0.01 * sum(RATES)


def test_sgd_is_torchs_except_for_its_decay() -> None:
    theirs = run_torch(lambda mine: torch.optim.SGD(mine, momentum=0.8))
    assert are_equal(run_ours(lambda mine: Sgd(mine, build_optimizer_config(momentum=0.8)), decay=0.0), theirs)
    plain = run_ours(lambda mine: Sgd(mine, build_optimizer_config(momentum=0.0)))
    by_hand = run_updates(
        mine := draw_parameters(), lambda number, rate: [p.mul_(1 - rate * DECAY).sub_(rate * p.grad) for p in mine.values()]
    )
    assert all(torch.allclose(left, right, atol=1e-6) for left, right in zip(plain, by_hand, strict=True))


def test_muon_is_torchs(single_rank_mesh: DeviceMesh) -> None:
    """In bfloat16, in which torch's Muon always orthogonalizes."""
    theirs = run_torch(lambda mine: torch.optim.Muon(mine, momentum=0.9, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"))
    mine, finer = (
        run_ours(
            lambda mine, exact=exact: Muon(
                mine, build_optimizer_config(momentum=0.9), ShardLayout(single_rank_mesh, {}, {}, ()), full_precision=exact
            )
        )
        for exact in (False, True)
    )
    assert are_equal(mine, theirs)
    assert not are_equal(finer, theirs)
    assert all(torch.allclose(left, right, atol=0.05) for left, right in zip(finer, theirs, strict=True))


METHODS: dict[str, Callable[[Mapping[str, nn.Parameter], DeviceMesh], UpdateRule]] = {
    "adamw": lambda mine, mesh: build_adamw(mine),
    "adamw with bfloat16 state": lambda mine, mesh: build_adamw(mine, state_precision="bfloat16"),
    "sgd": lambda mine, mesh: Sgd(mine, build_optimizer_config()),
    "muon": lambda mine, mesh: Muon(mine, build_optimizer_config(), ShardLayout(mesh, {}, {}, ()), full_precision=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_parameters_may_be_distributed_tensors(single_rank_mesh: DeviceMesh, name: str) -> None:
    """As with FSDP: gradients, state and steps are laid out like their parameters."""
    make = METHODS[name]
    mine = {
        key: nn.Parameter(distribute_tensor(parameter.detach(), single_rank_mesh, [Shard(0)]))
        for key, parameter in draw_parameters().items()
    }
    made = reset_state(make(mine, single_rank_mesh))

    def step(number: int, rate: float) -> None:
        made.step(number, rate, DECAY)

    divided = run_updates(mine, step, single_rank_mesh)
    assert all(isinstance(tensor, DTensor) for state in made.moments.values() for tensor in state.values())
    assert are_equal([tensor.to_local() for tensor in divided], run_ours(lambda mine: make(mine, single_rank_mesh)))


def test_orthogonal_keeps_the_directions_and_evens_the_lengths() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(7))
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonalize_matrix(matrix)
    inside = left.T @ made @ right.T
    assert lengths.max() / lengths.min() > 3
    assert torch.allclose(inside, torch.diag(inside.diagonal()), atol=1e-4)
    assert inside.diagonal().min() > 0.6
    assert inside.diagonal().max() < 1.3
    assert torch.allclose(orthogonalize_matrix(matrix.T), made.T, atol=1e-5)


def test_matrices_are_assigned_evenly_and_alike_on_all_ranks() -> None:
    costs = {"a": 5, "b": 3, "c": 3, "d": 2, "e": 1}
    assert assign_matrices_to_replicas(costs, 1) == dict.fromkeys(costs, 0)
    assert (
        assign_matrices_to_replicas(costs, 2)
        == assign_matrices_to_replicas(dict(reversed(costs.items())), 2)
        == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
    )
    assert sorted(assign_matrices_to_replicas(costs, 9).values()) == [0, 1, 2, 3, 4]


def test_muon_is_for_the_matrices_of_blocks_and_groups_may_say_otherwise() -> None:
    groups = [
        {"group_name": "tables", "parameters_include": ["embedding", "head"], "method": "sgd"},
        {"group_name": "rest", "parameters_exclude": ["embedding", "head"]},
    ]
    names = {"embedding.weight": 2, "head.weight": 2, "blocks.0.mlp.up.weight": 2, "blocks.0.mlp_norm.weight": 1, "norm.weight": 1}

    def chosen(groups: list[dict[str, Any]]) -> list[str]:
        parts = build_parameter_groups(list(names), Config.model_validate_json(json.dumps({"training_groups": groups})))
        owner = {name: part for part in parts for name in part.parameter_names}
        return [choose_optimizer_method(owner[name], name, dimensions, OptimizerMethod.muon) for name, dimensions in names.items()]

    assert chosen([]) == ["adamw", "adamw", "muon", "adamw", "adamw"]
    assert chosen(groups) == ["sgd", "sgd", "muon", "adamw", "adamw"]
    with pytest.raises(TrainingError) as caught:
        chosen([groups[0], {**groups[1], "method": "muon"}])
    assert (
        str(caught.value)
        == "config training_groups, group rest: blocks.0.mlp_norm.weight has 1 dimensions, but Muon supports only matrices"
    )


def test_which_state_of_a_checkpoint_is_loaded() -> None:
    model = {"model/a": (2, 3), "model/b": (4,)}
    adam = {f"optimizer/{kind}/{name}": size for kind in ("exp_avg", "exp_avg_sq") for name, size in (("a", (2, 3)), ("b", (4,)))}
    scale = {"optimizer/loss_scale/state": (3,)}
    assert select_tensors_to_load({**model, **adam}, {**model, **adam}, "here") == [*model, *adam]
    assert select_tensors_to_load(model, {**model, **adam}, "here") == list(model), "there was no state to lose"
    assert select_tensors_to_load({**model, **adam}, {**model, **adam, **scale}, "here") == [*model, *adam]
    assert select_tensors_to_load({**model, **adam, **scale}, {**model, **adam}, "here") == [*model, *adam]
    muon = {"optimizer/muon_momentum/a": (2, 3), "optimizer/exp_avg/b": (4,), "optimizer/exp_avg_sq/b": (4,)}
    for found, wanted in ((adam, muon), (muon, adam)):
        with pytest.raises(IncompatibleCheckpoint, match="has the state of a different optimizer: for a it has "):
            select_tensors_to_load({**model, **found}, {**model, **wanted}, "here")


def test_muon_updates_matrices_of_one_column_on_several_replicas(tmp_path: Path, config: dict[str, Any]) -> None:
    """LoRA of rank 1, in bfloat16: the transpose of a row counts as contiguous, although the step between its values is not 1."""
    architecture = {"lora_config": {"rank": 1}, "precision": "bfloat16"}
    base = merge_config(config, optimizer={"method": "muon"}, transformer_architecture=architecture)
    one, two = (run_training(tmp_path / str(size), base, size) for size in (1, 2))
    assert compute_deviation(one, two) < 1e-3
    assert one[12] != one[1]


def test_muon_is_the_same_in_every_topology_and_over_checkpoints(tmp_path: Path, config: dict[str, Any]) -> None:
    """Untied, gated, fewer key heads than query heads: matrices of every shape, sharded by rows and by columns."""
    shape = {"mlp_type": "swiglu", "attention_num_kv_heads": 2, "weight_tying": False}
    base = merge_config(config, optimizer={"method": "muon"}, trainer={"save_interval": 6}, transformer_architecture=shape)
    one = run_training(tmp_path / "one", base)
    assert one[12] < 0.9 * one[1], "a model that learns nothing is equal to anything"
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "run" / "step-00000012")
    moved = run_training(
        tmp_path / "moved", merge_config(base, topology={"model_parallel_size": 2}, trainer={"check_replicas_interval": 1}), 4
    )
    assert compute_deviation(one, moved) < 1e-6
    saved = read_manifest(tmp_path / "moved", 12)["tensors"]
    assert "optimizer/muon_momentum/blocks.0.mlp.gate.weight" in saved
    assert "optimizer/exp_avg/head.weight" in saved
    world = LocalWorld(tmp_path / "moved", merge_config(base, optimizer={"method": "adamw"}, trainer={"train_iterations": 13}), 1)
    assert world.wait() == [1]
    assert "has the state of a different optimizer: for blocks.0.attention.key.weight it has muon_momentum, but" in world.read_log()
