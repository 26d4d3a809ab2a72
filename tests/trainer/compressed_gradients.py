"""A script that compares the compressed gradients of one step with those computed from the gradients of all replicas on each rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.schema.fields.gradient_compression import GradientCompression
from swarmtrain.trainer import Optimizer, Transformer, open_data, parallelize, read_config, start_runtime
from swarmtrain.trainer.forward_backward import run_forward_backward
from swarmtrain.trainer.health.step_timer import StepTimer


def main() -> None:
    config = read_config(sys.argv[1:])
    with start_runtime(config) as runtime:
        topology, (data, _) = config.topology, open_data(config)
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime)
        optimizer, rank = Optimizer(model, config), dist.get_rank()
        batch = data.build_batch(0, topology.samples_per_step)
        replicas = [
            batch.select_micro_batches(model.mesh.micro_batches_per_replica, replica, topology.samples_per_micro_batch)
            for replica in range(runtime.world_size)
        ]

        def sum_gradients(micro_batches: Sequence[tuple[int, object]]) -> list[Tensor]:
            """Return the sums of the gradients of a replica's micro batches, computed without DDP, in the type of exact sums."""
            weights = list(model.local_model.parameters())
            dtype = torch.float32 if config.transformer_architecture.precision == "bfloat16" else torch.float64
            sums = [torch.zeros(weight.shape, dtype=dtype) for weight in weights]
            for _, ids in micro_batches:
                rows = data.load_samples(ids)  # type: ignore[arg-type]  # ids of samples
                loss = model.local_model(rows.inputs, rows.targets, rows.document_ids) / batch.loss_denominator
                torch._foreach_add_(sums, [gradient.to(dtype) for gradient in torch.autograd.grad(loss, weights)])
            return sums

        local_sums = dict(zip(model.parameters, zip(*map(sum_gradients, replicas), strict=True), strict=True))
        compressor = model.gradient_compressor
        assert compressor is not None
        factors = {name: tensor.clone() for name, tensor in compressor.collect_state_tensors().items() if name.startswith("factor/")}
        model.start_step(1)
        run_forward_backward(
            runtime,
            model,
            data,
            replicas[rank],
            next_micro_batches=replicas[rank],
            step=1,
            scale_loss=lambda loss: loss / batch.loss_denominator,
            timer=StepTimer(runtime.device),
        )
        for name, parameter in model.parameters.items():
            assert parameter.grad is not None
            if topology.gradient_compression is GradientCompression.bf16:
                expected = add_rounded(local_sums[name]).to(parameter.dtype)
                assert torch.equal(parameter.grad, expected), name
                assert not torch.equal(parameter.grad, torch.stack(local_sums[name]).sum(0).to(parameter.dtype)), f"{name} is not rounded"
                continue
            if f"factor/{name}" not in factors:
                torch.testing.assert_close(parameter.grad, torch.stack(local_sums[name]).sum(0).to(parameter.dtype))
                continue
            matrices = [each.flatten(1).float() for each in local_sums[name]]
            total = torch.stack(matrices).sum(0)
            left = torch.linalg.qr(total @ torch.linalg.qr(factors[f"factor/{name}"])[0])[0]
            torch.testing.assert_close(parameter.grad.flatten(1), left @ (left.T @ total), rtol=1e-3, atol=1e-6)
            error = compressor.collect_state_tensors()[f"error/{name}"]
            torch.testing.assert_close(error, matrices[rank] - left @ (left.T @ matrices[rank]), rtol=1e-3, atol=1e-6)
            assert float(error.norm()) > 0.1 * float(matrices[rank].norm()) or not replicas[rank], f"{name} has no error to feed back"
        check_clipping(model.parameters, optimizer, config.optimizer.gradient_clipping)
        sys.stdout.write("the gradients are as expected\n")


def add_rounded(replicas: Sequence[Tensor]) -> Tensor:
    """Return the sum of the gradients of `replicas`, each rounded to bfloat16, added in float32, and rounded to bfloat16."""
    total = torch.zeros_like(replicas[0], dtype=torch.float32)
    for gradient in replicas:
        total += gradient.bfloat16()
    return total.bfloat16()


def check_clipping(parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer, limit: float) -> None:
    """Check that the norm of the compressed gradients is what is clipped."""
    gradients = [parameter.grad.clone() for parameter in parameters.values() if parameter.grad is not None]
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    update = optimizer.prepare_step(1)
    assert update.clipped
    assert abs(update.gradient_norm - float(norm)) < 1e-5 * float(norm)
    for before, parameter in zip(gradients, parameters.values(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, before * (limit / float(norm)), rtol=1e-4, atol=1e-9)
