"""No code of the trainer sends or loads pickles: they can execute code when they are loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OBJECT_COLLECTIVE = re.compile(r"(gather|scatter|broadcast|send|recv)_object(_list)?$")
DCP = "torch.distributed.checkpoint"
DCP_FUNCTIONS = {"save", "load", "async_save", "save_state_dict", "load_state_dict"}
"""Functions of torch.distributed.checkpoint that exchange plans and errors of ranks with object collectives."""
PICKLE_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


def list_pickling_calls(code: str) -> Iterator[str]:
    """Yield what in `code` sends or loads pickles."""
    tree = ast.parse(code)
    checkpoint_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name == DCP or (isinstance(node, ast.ImportFrom) and f"{node.module}.{alias.name}" == DCP)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if OBJECT_COLLECTIVE.search(node.attr):
                yield node.attr
            if node.attr in DCP_FUNCTIONS and ast.unparse(node.value) in checkpoint_names:
                yield f"{DCP}.{node.attr}"
            if ast.unparse(node) == "torch.load":
                yield "torch.load"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if OBJECT_COLLECTIVE.search(alias.name) or (node.module.startswith(DCP) and alias.name in DCP_FUNCTIONS):
                    yield f"{node.module}.{alias.name}"
            if node.module.partition(".")[0] in PICKLE_MODULES:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLE_MODULES)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w*_object(_list)?", node.value):
            yield node.value


def test_no_module_sends_or_loads_pickles() -> None:
    calls = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / "swarmtrain").rglob("*.py")
        if (found := [*list_pickling_calls(path.read_text())])
    }
    assert calls == {}


def test_pickling_calls_are_found() -> None:
    examples = {
        "import torch.distributed as dist\ndist.all_gather_object(values, value)": "all_gather_object",
        "import torch\ntorch.distributed.broadcast_object_list(values, src=0)": "broadcast_object_list",
        "from torch.distributed import scatter_object_list": "torch.distributed.scatter_object_list",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state)": f"{DCP}.load",
        "from torch.distributed import checkpoint\ncheckpoint.async_save(state)": f"{DCP}.async_save",
        "import torch.distributed.checkpoint\ntorch.distributed.checkpoint.save(state)": f"{DCP}.save",
        "from torch.distributed.checkpoint import load": f"{DCP}.load",
        "getattr(dist, 'gather_object')": "gather_object",
        "import torch\ntorch.load(path)": "torch.load",
        "import pickle": "pickle",
    }
    assert {code: [*list_pickling_calls(code)] for code in examples} == {code: [found] for code, found in examples.items()}
