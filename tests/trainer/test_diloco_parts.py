"""The parts of DiLoCo: quantization, the exchange of pseudo-gradients, the outer step, and configs that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmtrain.config import Config
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.optimizer import DilocoConfig, Quantization
from swarmtrain.errors import ConfigError, TrainingError
from swarmtrain.trainer import Optimizer, Transformer, collectives, parallelize, start_runtime
from swarmtrain.trainer.diloco.exchange import (
    BLOCK_SIZE,
    MAX_BUCKET_ELEMENTS,
    PendingMean,
    PseudoGradientExchange,
    compute_encoded_size,
    decode_tensor,
    encode_tensor,
)
from swarmtrain.trainer.diloco.learner import Learner
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer, DilocoTrainingState, assign_fragments, list_starting_fragments
from swarmtrain.trainer.health.step_timer import StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout
from swarmtrain.trainer.model.objective import EmbeddingObjective

HIGHEST_LEVEL = {Quantization.int8: 127, Quantization.int4: 7}
QUANTIZED = pytest.mark.parametrize("quantization", HIGHEST_LEVEL, ids=str)


@QUANTIZED
@pytest.mark.parametrize("columns", [1, 2, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 10 * BLOCK_SIZE + 7])
def test_no_value_changes_by_more_than_half_a_scale(quantization: Quantization, columns: int) -> None:
    values = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)) * torch.logspace(-6, 3, columns)
    encoded = encode_tensor(values, quantization)
    assert len(encoded) == compute_encoded_size(values.shape, values.dtype, quantization)
    decoded = decode_tensor(encoded, values.shape, values.dtype, quantization)
    for block, decoded_block in zip(values.split(BLOCK_SIZE, dim=1), decoded.split(BLOCK_SIZE, dim=1), strict=True):
        scales = block.abs().amax(dim=1, keepdim=True) / HIGHEST_LEVEL[quantization]
        assert ((block - decoded_block).abs() <= scales / 2 * (1 + 1e-5)).all()
    assert torch.equal(encode_tensor(values, quantization), encoded), "equal values give equal bytes"


@QUANTIZED
def test_multiples_of_the_scale_are_exact(quantization: Quantization) -> None:
    """All levels, so every int4 value is packed into a low and into a high half of a byte."""
    highest = HIGHEST_LEVEL[quantization]
    levels = torch.arange(-highest, highest + 1, dtype=torch.float32)
    values = torch.stack([levels, levels.flip(0), torch.zeros_like(levels)]) * 0.25
    assert torch.equal(decode_tensor(encode_tensor(values, quantization), values.shape, values.dtype, quantization), values)


@pytest.mark.parametrize("quantization", Quantization, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (7, BLOCK_SIZE + 3), (7, 3, 100), (7,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shards_by_rows_are_encoded_as_the_whole_tensor(quantization: Quantization, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """So FSDP does not change what learners exchange. A rank may have no rows."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    whole, *shards = [
        decode_tensor(encode_tensor(each, quantization), each.shape, dtype, quantization)
        for each in (values, values[:3], values[3:], values[7:])
    ]
    assert torch.equal(torch.cat(shards), whole)
    assert whole.dtype == dtype


@pytest.mark.parametrize("quantization", Quantization, ids=str)
@pytest.mark.parametrize("shape", [(2, BLOCK_SIZE), (BLOCK_SIZE,)], ids=str)
def test_a_value_that_is_not_finite_is_not_hidden(quantization: Quantization, shape: tuple[int, ...]) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(shape)
        values[..., 3] = bad
        assert not decode_tensor(encode_tensor(values, quantization), values.shape, values.dtype, quantization)[..., 3].isfinite().any()


@pytest.mark.parametrize(("quantization", "bytes_per_value"), [("none", 4.0), ("int8", 1 + 4 / 256), ("int4", 0.5 + 4 / 256)])
def test_bytes_per_value(quantization: str, bytes_per_value: float) -> None:
    assert compute_encoded_size(torch.Size([1 << 10, 1 << 10]), torch.float32, Quantization(quantization)) == bytes_per_value * (1 << 20)


@pytest.mark.parametrize("quantization", Quantization, ids=str)
def test_each_learner_sends_its_bytes_once_per_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantization: Quantization) -> None:
    """Three learners in two groups; the exchange is that of the first group, and this test is the network."""
    with start_runtime(_build_config(tmp_path, learners=3, diloco={"quantization": quantization})) as runtime:
        optimizer = _build_optimizer(runtime)
        local, remote = optimizer.learners[:2], optimizer.learners[2:]
        for learner in optimizer.learners:
            _change_parameters(learner)
        sent: list[int] = []

        def gather(outputs: Sequence[torch.Tensor], local_bytes: torch.Tensor, **_: Any) -> SimpleNamespace:
            outputs[0][:] = local_bytes
            remote_bytes = encode_remote()[sum(sent) :][: len(local_bytes)]
            outputs[1][: len(remote_bytes)] = remote_bytes
            sent.append(local_bytes.numel())
            return SimpleNamespace(wait=lambda: None)

        def encode_remote() -> torch.Tensor:
            parameters = _get_global_parameters(optimizer)
            return torch.cat([encode_tensor(value - remote[0].parameters[name], quantization) for name, value in parameters.items()])

        monkeypatch.setattr(dist, "all_gather", gather)
        monkeypatch.setattr(collectives, "MESSAGE_BYTES", 1000)
        parameters, groups = _get_global_parameters(optimizer), [range(2), range(2, 3)]
        names = list(parameters)
        divided = PseudoGradientExchange(groups, object(), quantization).start(  # type: ignore[arg-type]  # `gather` does not use it
            [learner.compute_pseudo_gradients(parameters, names) for learner in local]
        )
        together = PseudoGradientExchange([range(3)], None, quantization).start(
            [learner.compute_pseudo_gradients(parameters, names) for learner in optimizer.learners]
        )
        assert sum(sent) == 2 * optimizer.bytes_per_learner
        assert max(sent) == 1000 < min(sent[:-1]) + 1
        assert all(torch.equal(divided.wait()[name], mean) for name, mean in together.wait().items())
        differences = {
            name: sum(value - learner.parameters[name] for learner in optimizer.learners) / 3 for name, value in parameters.items()
        }
        tolerance = {Quantization.none: 1e-6, Quantization.int8: 1e-2, Quantization.int4: 1.5e-1}[quantization]
        for name, expected in differences.items():
            torch.testing.assert_close(together.wait()[name], expected, rtol=0, atol=tolerance * float(expected.abs().max() + 1e-6) * 3)


@pytest.mark.parametrize("bucket_elements", [MAX_BUCKET_ELEMENTS, 1], ids=["one-bucket", "a-bucket-per-parameter"])
def test_the_outer_step_is_that_of_torch_with_nesterov_momentum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bucket_elements: int
) -> None:
    monkeypatch.setattr("swarmtrain.trainer.diloco.optimizer.MAX_BUCKET_ELEMENTS", bucket_elements)
    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        optimizer = _build_optimizer(runtime)
        expected = {name: torch.nn.Parameter(value.clone()) for name, value in _get_global_parameters(optimizer).items()}
        torch_optimizer = torch.optim.SGD(expected.values(), lr=0.7, momentum=0.9, nesterov=True)
        for number in range(1, 5):
            for learner in optimizer.learners:
                _change_parameters(learner)
            for name, parameter in expected.items():
                parameter.grad = sum(parameter.detach() - learner.parameters[name] for learner in optimizer.learners) / 2
            torch_optimizer.step()
            optimizer.finish_round(2 * number, StepTimer(runtime.device), CollectiveTimeout([]), lambda: None)
            for name, value in _get_global_parameters(optimizer).items():
                torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6)
                assert all(torch.equal(learner.parameters[name], value) for learner in optimizer.learners), "all start from it"


def test_the_outer_step_runs_once_and_only_after_a_round(tmp_path: Path) -> None:
    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        optimizer, steps = _build_optimizer(runtime), []
        for step in (0, 1, 2, 2, 3, 4, 4, 5):  # 5 is the last step of the run
            before = {name: value.clone() for name, value in _get_global_parameters(optimizer).items()}
            for learner in optimizer.learners:
                _change_parameters(learner)
            optimizer.finish_round(step, StepTimer(runtime.device), CollectiveTimeout([]), lambda: None)
            if any(not torch.equal(value, before[name]) for name, value in _get_global_parameters(optimizer).items()):
                steps.append(step)
        assert steps == [2, 4, 5]


def test_a_state_saved_before_the_outer_step_runs_it_when_it_is_loaded(tmp_path: Path) -> None:
    """As in a just-in-time checkpoint of surviving ranks whose peer dies after the last inner step of a round."""
    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        first, second = _build_optimizer(runtime), _build_optimizer(runtime)
        for learner in first.learners:
            _change_parameters(learner)
        for name, tensor in second.collect_state_tensors().items():
            tensor.copy_(first.collect_state_tensors()[name])
        for optimizer in (first, second):
            optimizer.finish_round(2, StepTimer(runtime.device), CollectiveTimeout([]), lambda: None)
        for name, value in _get_global_parameters(first).items():
            assert torch.equal(value, _get_global_parameters(second)[name])
        for name, tensor in second.collect_state_tensors().items():
            assert torch.equal(tensor, first.collect_state_tensors()[name])


def test_a_rank_whose_exchange_failed_saves_no_just_in_time_checkpoint(tmp_path: Path) -> None:
    """It does not know whether other ranks have run the outer step. Nothing has changed."""

    def fail() -> None:
        raise RuntimeError("a peer has failed")

    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        optimizer = _build_optimizer(runtime)
        for learner in optimizer.learners:
            _change_parameters(learner)
        before = {
            name: tensor.clone() for name, tensor in {**_get_global_parameters(optimizer), **optimizer.collect_state_tensors()}.items()
        }
        assert not optimizer.is_updating
        with pytest.raises(RuntimeError):
            optimizer.finish_round(2, StepTimer(runtime.device), CollectiveTimeout([]), fail)
        assert optimizer.is_updating
        after = {**_get_global_parameters(optimizer), **optimizer.collect_state_tensors()}
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_model_has_the_global_parameters_unless_a_learner_uses_it(tmp_path: Path) -> None:
    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        optimizer = _build_optimizer(runtime)
        model_parameters = optimizer.learners[0].inner_optimizer.parameters
        before = {name: parameter.detach().clone() for name, parameter in model_parameters.items()}
        for learner in optimizer.learners:
            _change_parameters(learner)
            own = _copy_tensors(learner.parameters)
            with learner.use_parameters():
                assert all(torch.equal(parameter, own[name]) for name, parameter in model_parameters.items())
            assert all(torch.equal(value, own[name]) for name, value in learner.parameters.items())
            assert all(torch.equal(parameter, before[name]) for name, parameter in model_parameters.items())


BATCH = "global_batch_size: 8, micro_batch_size: 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (f"topology: {{learners: 3, {BATCH}}}", "8 is not a multiple of learners x micro_batch_size = 3"),
        (f"topology: {{learners: 2, {BATCH}, data_parallel_type: fsdp, cpu_offload: true}}", "topology.cpu_offload .*: is not supported"),
        (f"topology: {{learners: 2, {BATCH}, pipe_parallel_size: 2}}", "pipe_parallel_size .*: is not supported with learners"),
        (f"topology: {{learners: 2, {BATCH}, context_parallel_size: 2}}", "context_parallel_size .*: is not supported with learners"),
        (f"{{topology: {{learners: 2, {BATCH}}}, diloco: {{fragments: 3}}}}", "100 is not a multiple of fragments 3"),
        (
            f"{{topology: {{learners: 2, {BATCH}}}, diloco: {{fragments: 2, overlap: 50}}}}",
            "50 is not less than inner_steps / fragments = 50",
        ),
        (f"{{topology: {{learners: 2, {BATCH}}}, diloco: {{fragments: 20}}}}", "20 is above transformer_architecture.num_layers"),
        ("diloco: {inner_steps: 50}", "has no effect: topology.learners is null"),
    ],
)
def test_a_config_that_learners_do_not_support_is_refused(changes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(changes)


def test_fragments_are_strided_and_exchanged_once_per_round() -> None:
    names = ["embedding.weight", *(f"blocks.{layer}.mlp.weight" for layer in range(5)), "norm.weight", "head.weight"]
    first, second = assign_fragments(names, 5, 2)
    assert first == ["embedding.weight", "blocks.0.mlp.weight", "blocks.2.mlp.weight", "blocks.4.mlp.weight", "norm.weight", "head.weight"]
    assert second == ["blocks.1.mlp.weight", "blocks.3.mlp.weight"]
    settings = DilocoConfig(inner_steps=6, fragments=3, overlap=1)
    starting = {step: each for step in range(13) if (each := list_starting_fragments(settings, step))}
    assert starting == {2: [1], 4: [2], 6: [0], 8: [1], 10: [2], 12: [0]}


def test_a_fragment_is_updated_after_the_overlap_and_mixed(tmp_path: Path) -> None:
    """Its pseudo-gradient is that of the step at which its exchange started, however the learner has changed since."""
    diloco = {"fragments": 1, "overlap": 1, "mixing": 0.25, "outer_optimizer": {"learning_rate": 1.0, "momentum": 0.0}}
    with start_runtime(_build_config(tmp_path, learners=1, diloco=diloco)) as runtime:
        optimizer = _build_optimizer(runtime)
        (learner,), parameters = optimizer.learners, _get_global_parameters(optimizer)
        run = partial(optimizer.finish_round, timer=StepTimer(runtime.device), timeout=CollectiveTimeout([]), check_results=lambda: None)
        _change_parameters(learner)
        sent, before = (_copy_tensors(each) for each in (learner.parameters, parameters))
        run(2)
        assert all(torch.equal(parameters[name], before[name]) for name in parameters), "the exchange is in progress"
        _change_parameters(learner)
        own = _copy_tensors(learner.parameters)
        run(3)
        for name, value in parameters.items():
            torch.testing.assert_close(value, sent[name])
            torch.testing.assert_close(learner.parameters[name], 0.25 * own[name] + 0.75 * sent[name])


def test_an_overlapped_exchange_is_spread_over_the_steps_of_the_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first process is replaced after step 5 by one that loads its state: that starts the parts that are due, and later the others."""
    started: list[str] = []

    def record(exchange: PseudoGradientExchange, pseudo_gradients: Sequence[Mapping[str, torch.Tensor]]) -> PendingMean:
        started.extend(pseudo_gradients[0])
        return start(exchange, pseudo_gradients)

    start = PseudoGradientExchange.start
    monkeypatch.setattr(PseudoGradientExchange, "start", record)
    diloco = {"inner_steps": 4, "overlap": 3}
    with start_runtime(_build_config(tmp_path, learners=2, diloco=diloco, train_iterations=9)) as runtime:
        first, second = _build_optimizer(runtime), _build_optimizer(runtime)
        for learner in first.learners:
            _change_parameters(learner)
        sizes = {name: parameter.numel() for name, parameter in _get_global_parameters(first).items()}
        sent = []
        for optimizer, step in ((first, 3), (first, 4), (first, 5), (second, 5), (second, 6), (second, 7)):
            if (optimizer, step) == (second, 5):
                for name, tensor in second.collect_state_tensors().items():
                    tensor.copy_(first.collect_state_tensors()[name])
            started.clear()
            optimizer.finish_round(step, StepTimer(runtime.device), CollectiveTimeout([]), lambda: None)
            sent.append(list(started))
        assert sent[0] == sent[5] == []
        assert sent[1] + sent[2] == sent[3]
        assert sent[3] + sent[4] == list(sizes)
        assert all(0.2 < sum(map(sizes.__getitem__, names)) / sum(sizes.values()) < 0.6 for names in (sent[1], sent[2], sent[4]))


def test_an_objective_that_compares_all_samples_is_refused(tmp_path: Path) -> None:
    """A custom one: the config of the shipped one is refused."""
    with start_runtime(_build_config(tmp_path, learners=2)) as runtime:
        model = parallelize(Transformer(runtime.config.transformer_architecture, 1), runtime)
        abstract_methods = dict.fromkeys(EmbeddingObjective.__abstractmethods__)
        model.local_model.objective = type("Custom", (EmbeddingObjective,), abstract_methods)()
        with pytest.raises(TrainingError, match="is not supported by objectives that compare"):
            DilocoOptimizer(runtime, model, Optimizer(model, runtime.config))


def test_the_assignment_of_learners_to_replicas() -> None:
    topology = parse_config("topology: {learners: 4, global_batch_size: 16, micro_batch_size: 2}").topology
    assert [[*group] for group in topology.assign_learners(3)] == [[0, 1], [2], [3]]
    assert [[*group] for group in topology.assign_learners(8)] == [[0], [1], [2], [3]]
    assert [topology.assign_micro_batches(size) for size in (1, 3, 8)] == [(8,), (4, 2, 2), (1,) * 8]
    hybrid = parse_config(
        "topology: {learners: 2, global_batch_size: 16, micro_batch_size: 2, data_parallel_type: hsdp, data_parallel_shard_size: 2}"
    ).topology
    assert len(hybrid.assign_learners(4)) == 2
    with pytest.raises(ValueError, match="1 replicas per learner are not a multiple of data_parallel_shard_size 2"):
        hybrid.assign_learners(2)
    plain = parse_config("topology: {global_batch_size: 16, micro_batch_size: 2}").topology
    assert plain.assign_learners(5) == (range(1),)


@pytest.fixture(autouse=True)
def _in_one_process(_single_process: Iterator[None]) -> None: ...


def _build_config(folder: Path, *, learners: int, diloco: Mapping[str, Any] | None = None, train_iterations: int = 5) -> Config:
    architecture = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 8}
    values = {
        "topology": {"learners": learners, "global_batch_size": 2 * learners, "micro_batch_size": 1},
        "diloco": {"inner_steps": 2, **(diloco or {})},
        "trainer": {"train_iterations": train_iterations, "save_dir": str(folder)},
        "transformer_architecture": architecture,
    }
    return Config.model_validate_json(json.dumps(values))


def _copy_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _build_optimizer(runtime: Any) -> DilocoOptimizer:
    """Return the optimizer of a new model, whose learners have started."""
    model = parallelize(Transformer(runtime.config.transformer_architecture, 1), runtime)
    optimizer = DilocoOptimizer(runtime, model, Optimizer(model, runtime.config))
    DilocoTrainingState(model, optimizer).write_missing_values()
    return optimizer


def _change_parameters(learner: Learner) -> None:
    """Change the parameters of `learner` as inner steps would: by values that depend on the learner."""
    generator = torch.Generator().manual_seed(learner.index)
    for parameter in learner.parameters.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _get_global_parameters(optimizer: DilocoOptimizer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in optimizer.learners[0].inner_optimizer.parameters.items()}
