"""Pinned host memory of exactly the size that is needed.

torch's allocator rounds pinned memory up to a power of two: 65 GB would need 128 GB (pytorch issue 171662). So, as torch's distributed
checkpoint does, ordinary memory is registered with CUDA instead.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)


def allocate_pinned_memory(size: int) -> Tensor:
    """Return `size` bytes of uninitialized pinned memory, as uint8. If CUDA cannot pin it, log a warning and return pageable memory."""
    buffer = torch.empty(size, dtype=torch.uint8)
    if not size:
        return buffer
    address = buffer.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]  # not typed in torch
    if error:
        LOG.warning("cannot pin %s MiB of host memory (CUDA error %s): checkpoints are copied from the GPU more slowly", size >> 20, error)
    else:
        # Not at exit, when CUDA may be shut down already.
        weakref.finalize(buffer, _unpin_memory, address).atexit = False
    return buffer


def _unpin_memory(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # not typed in torch
