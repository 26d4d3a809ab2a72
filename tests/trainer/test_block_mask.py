"""Block masks: the blocks that flex attention skips or computes without a mask are those of torch's create_block_mask."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from swarmtrain.trainer.model.attention.flex import build_block_mask
from swarmtrain.trainer.model.attention.visibility import Visibility

CPU = torch.device("cpu")
MEMORY_SCRIPT = """
import resource, torch
from swarmtrain.trainer.model.attention.flex import build_block_mask
from swarmtrain.trainer.model.attention.visibility import Visibility

def build(length):
    documents = (torch.arange(length) * 8 // length)[None]
    build_block_mask(Visibility(1, length, torch.device("cpu"), documents))

build(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
build(131072)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def draw_documents(length: int, samples: int = 2) -> Tensor:
    """Return ascending document ids for each token, with documents of about 100 tokens."""
    return (torch.rand(samples, length) < 0.01).cumsum(1)


@pytest.mark.parametrize("window_size", [None, 5, 200])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_context_parallel", [False, True])
def test_blocks_are_those_of_torch(window_size: int | None, has_documents: bool, is_context_parallel: bool) -> None:
    torch.manual_seed(0)
    for length in (128, 300, 512, 777, 1024):
        if is_context_parallel and length % 512:
            continue
        documents = draw_documents(length) if has_documents else None
        quarter = length // 4
        ranges = (range(quarter), range(3 * quarter, length)) if is_context_parallel else None
        visibility = Visibility(2, length, CPU, documents, window_size, ranges)
        mask = build_block_mask(visibility)
        size = visibility.query_count, length
        expected = create_block_mask(visibility.build_mask_mod(), 2 if has_documents else 1, None, *size, device="cpu")
        assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
        visible, expected_visible = mask.to_dense() != 0, expected.to_dense() != 0
        assert not (expected_visible & ~visible).any(), "a visible block would be skipped"
        # With documents and a window, both may overlap with the block, but in no common pair of tokens.
        assert (visible & ~expected_visible).sum() <= (0.05 * visible.sum() if has_documents and window_size else 0)
        for row in range(visible.shape[2]):
            count = int(mask.full_kv_num_blocks[0, 0, row])
            listed = mask.full_kv_indices[0, 0, row, :count]
            assert torch.equal(listed.sort().values, expected.full_kv_indices[0, 0, row, :count].sort().values)


def test_documents_need_not_be_in_order() -> None:
    documents = torch.tensor([[3] * 200 + [1] * 100 + [3] * 84])
    visibility = Visibility(1, 384, CPU, documents)
    mask = build_block_mask(visibility)
    expected = create_block_mask(visibility.build_mask_mod(), 1, None, 384, 384, device="cpu")
    assert not ((expected.to_dense() != 0) & (mask.to_dense() == 0)).any()
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)


def test_the_mask_of_131072_tokens_needs_less_than_100_mb() -> None:
    megabytes = float(subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True).stdout)
    assert megabytes < 100
