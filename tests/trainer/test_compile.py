"""Compiled blocks train as others do, and a machine that cannot compile says so before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import World, changed, deviation, held_out, train


@pytest.mark.test_all_only("compiles with inductor")
def test_compiled_replicas_equal_one_process_that_is_not(tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations computed again, which is done around what is compiled; whoever keeps parameters and optimizer state."""
    monkeypatch.setattr(worlds, "TIMEOUT", 300.0)  # a C++ compiler on a busy machine
    base = changed(config, trainer={"train_iterations": 4, "eval_iterations": 1}, topology={"micro_batch_size": 4})
    one = train(tmp_path / "one", base)
    # What is compiled is compiled in each rank itself, and for any processor: half of the compiler's time.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    stages = {"pipe_parallel_size": 2, "activation_checkpointing_type": "every_pipe_stage"}
    divided = stages | {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2}
    compiled = changed(base, trainer={"compile": True}, topology=divided)
    assert deviation(one, train(tmp_path / "compiled", compiled, 4, cache)) < 1e-5
    assert deviation(held_out(tmp_path / "one"), held_out(tmp_path / "compiled")) < 1e-5
    assert list((tmp_path / "cache").rglob("*.so")), "nothing was compiled"


def test_without_a_compiler(tmp_path: Path, config: dict[str, Any]) -> None:
    world = World(tmp_path, changed(config, trainer={"compile": True}), 1, {"CXX": "no-such-compiler", "PATH": str(tmp_path)})
    assert world.wait() == [1]
    assert "config trainer.compile: needs a C++ compiler" in world.log()
    assert not (tmp_path / "run").exists()
