"""The private names of torch that the package uses, each with its reason. A new one is added here, or avoided."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "swarmtrain"

PRIVATE_NAMES = {
    "_C": "holds the next two functions",
    "_accelerator_setAllocatorSettings": "torch has no public function for the settings of the GPU allocator",
    "_c10d_functional": "the collectives that torch.compile traces",
    "_cdata": "identity of a storage that several tensors share",
    "_clear_sharding_prop_cache": "a simulated rank must not fill the cache of the process",
    "_current_graph_task_id": "whether code runs in a backward pass; torch has no public function",
    "_disable_current_modes": "a simulated rank creates real tensors inside its mode",
    "_dump_snapshot": "documented for memory snapshots, although private",
    "_dynamo": "imported early, since DDP imports it in its first step; limit of recompilations",
    "_flatten": "one process group for two dimensions of a device mesh",
    "_foreach_copy_": "copies many tensors at once; the loop over copy_ is several times slower",
    "_get_backend": "timeouts and aborts are methods of the backend of a process group",
    "_get_default_group": "the default group as the type that a device mesh needs",
    "_group_end": "aborts all NCCL communicators at once",
    "_group_start": "aborts all NCCL communicators at once",
    "_inductor": "settings and errors of the compiler",
    "_internal": "torch's own fake process group, for a simulated rank",
    "_local_scalar_dense": "operator to which a simulated rank must not answer with a real value",
    "_local_tensor": "the shard of a DTensor without an autograd node",
    "_python_dispatch": "holds TorchDispatchMode, which has no public name",
    "_pytree": "the leaves of nested containers, as torch finds them",
    "_record_memory_history": "documented for memory snapshots, although private",
    "_replace": "method of a named tuple, which is not torch's",
    "_resolve_process_group": "process group by the name that torch.compile passes",
    "_scaled_dot_product_cudnn_attention": "operator whose result is kept by activation checkpointing",
    "_scaled_dot_product_efficient_attention": "operator whose result is kept by activation checkpointing",
    "_scaled_dot_product_flash_attention": "operator whose result is kept by activation checkpointing",
    "_scaled_dot_product_flash_attention_for_cpu": "operator whose result is kept by activation checkpointing",
    "_scaled_dot_product_fused_attention_overrideable": "operator whose result is kept by activation checkpointing",
    "_scaled_mm": "the matrix product in float8",
    "_set_default_timeout": "timeout of the collectives of a process group that exists",
    "_subclasses": "holds FakeTensorMode, which has no public name",
    "_triton": "whether torch.compile can use Triton",
    "_varlen_attn": "operator whose result is kept by activation checkpointing",
    "_version": "whether a parameter was changed in place",
}
OVERRIDDEN_METHODS = {"_monitor_workers", "_shutdown", "_start_workers", "_stop_workers"}
"""torch asks a subclass of SimpleElasticAgent for these methods."""
OTHER_LIBRARIES = {"os", "sys", "atexit", "socket", "threading", "multiprocessing", "hashlib"}


@cache
def parse_package() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


@cache
def list_own_names() -> set[str]:
    """Return all names that the package itself defines."""
    names = set()
    for tree in parse_package().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def list_private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module reads from others, except from the standard library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (part for alias in node.names for part in f"{node.module}.{alias.name}".split(".") if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (
                part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".") if is_private(part)
            )
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in list_own_names():
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Name) and root.id in OTHER_LIBRARIES):
                yield node.attr


def test_the_list_of_private_names_is_complete_and_none_is_superfluous() -> None:
    used = {
        name for path, tree in parse_package().items() if "torch" in path.read_text(encoding="utf-8") for name in list_private_names(tree)
    }
    assert used == set(PRIVATE_NAMES)


def test_the_entrypoint_uses_torch_by_its_documented_interfaces() -> None:
    private_names = {
        (path.name, name)
        for path, tree in parse_package().items()
        if path.is_relative_to(PACKAGE / "entrypoint")
        for name in list_private_names(tree)
    }
    assert private_names == set()
    agent = pytest.importorskip("torch.distributed.elastic.agent.server").SimpleElasticAgent
    from swarmtrain.entrypoint.supervisor.rank_agent import RankAgent
    from swarmtrain.entrypoint.supervisor.rendezvous_handler import CoordinatorRendezvousHandler

    assert {name for name in vars(RankAgent) if is_private(name) and hasattr(agent, name)} - {"_abc_impl"} == OVERRIDDEN_METHODS
    assert {name for name in OVERRIDDEN_METHODS if getattr(agent, name).__isabstractmethod__} == OVERRIDDEN_METHODS
    assert not CoordinatorRendezvousHandler.__abstractmethods__
