"""Settings of torch's allocators, chosen without a GPU: `make gpu` shows what they do on one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from swarmtrain.trainer import runtime
from swarmtrain.trainer.checkpoint.storage.tensor_storage import allocate_pinned_memory


class FakeCudaRuntime:
    """Registers host memory as CUDA's runtime does."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.sizes_by_address, self.unregistered = error, dict[int, int](), list[int]()

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        self.sizes_by_address[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return 0


def test_pinned_memory_has_the_size_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    size = (1 << 20) + 3
    buffer = allocate_pinned_memory(size)
    address = buffer.data_ptr()
    assert buffer.nbytes == buffer.untyped_storage().nbytes() == size
    assert cuda.sizes_by_address == {address: size}
    assert not cuda.unregistered
    del buffer
    assert cuda.unregistered == [address], "memory is unregistered before it is freed"
    assert allocate_pinned_memory(0).numel() == 0


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCudaRuntime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    with caplog.at_level(logging.WARNING):
        buffer = allocate_pinned_memory(3 << 20)
    assert "cannot pin 3 MiB of host memory (CUDA error 2)" in caplog.text
    assert buffer.nbytes == 3 << 20
    del buffer
    assert not cuda.unregistered


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_of_gpu_memory_can_grow_unless_the_user_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(runtime, "torch", SimpleNamespace(_C=SimpleNamespace(_accelerator_setAllocatorSettings=settings.append)))
    runtime._configure_gpu_allocator({name: "max_split_size_mb:128"})
    assert not settings
    runtime._configure_gpu_allocator({})
    assert settings == ["expandable_segments:True"]


def test_torch_accepts_the_setting() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        runtime._configure_gpu_allocator({})
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
