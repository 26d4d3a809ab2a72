"""Repeated and resumed runs, compared bit by bit, with each value of trainer.deterministic."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Machine, Row
from models import DOCUMENTS, Sections, build_config, merge_sections
from workers import Worker

from swarmtrain.trainer.loop import train_model
from swarmtrain.trainer.speed.session import TrainingSession, open_session

_STEPS, _STOPPED_STEPS = 6, 3
_SIZES = {
    "cuda": {"vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "num_attention_heads": 4, "sequence_length": 1024},
    "cpu": {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 64},
}
_VARIANTS = {"plain attention": {}, "documents": DOCUMENTS}


@pytest.fixture(scope="module", params=["ignore", "prefer", "require"])
def mode_worker(request: pytest.FixtureRequest) -> Iterator[tuple[str, Worker]]:
    """A value of trainer.deterministic, which is a setting of a process, and a process for it."""
    with Worker() as device_worker:
        yield request.param, device_worker


@pytest.mark.parametrize("name", _VARIANTS)
def test_repeated_and_resumed_runs(row: Row, machine: Machine, mode_worker: tuple[str, Worker], name: str, tmp_path: Path) -> None:
    mode, worker = mode_worker
    row.name = f"{mode}, {name}"
    sections = merge_sections(
        {
            "topology": {"global_batch_size": 4, "micro_batch_size": 2},
            "learning_rate_scheduler": {"learning_rate": 1e-3, "learning_rate_decay_style": "constant"},
            "transformer_architecture": {"precision": "bfloat16", **_SIZES[machine.device_type]},
            "trainer": {"deterministic": mode, "save_interval": None, "train_iterations": _STEPS},
            "logger": {"log_interval": 1000},
        },
        _VARIANTS[name],
    )
    row.values |= worker.call(compare_runs, sections=sections, folder=str(tmp_path), timeout=machine.scale_limit(60))
    if mode == "require" or not machine.is_cuda:  # prefer excludes the gradients of attention on a GPU
        assert row.values["repeated_equal"]
        assert row.values["resumed_equal"]


def compare_runs(sections: Sections, folder: str) -> dict[str, Any]:
    """Train a model twice without and once with an interruption, and compare the parameters after the last step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = _train(sections, Path(folder) / "first", _STEPS)
        repeated = _train(sections, Path(folder) / "repeated", _STEPS)
        _train(sections, Path(folder) / "resumed", _STOPPED_STEPS)
        resumed = _train(sections, Path(folder) / "resumed", _STEPS)
    nondeterministic = sorted({str(each.message).split(" ")[0] for each in caught if "deterministic" in str(each.message)})
    return {"repeated_equal": repeated == first, "resumed_equal": resumed == first, "warnings": ", ".join(nondeterministic)[:200]}


def _train(sections: Sections, save_dir: Path, steps: int) -> str:
    """Train to step `steps`, from the newest checkpoint in `save_dir` if there is one. Return a digest of the parameters."""
    config = build_config(merge_sections(sections, {"trainer": {"save_dir": str(save_dir), "train_iterations": steps}}))
    with open_session(config) as session:
        train_model(session.runtime, session.model, session.optimizer, session.data, None, extra_metrics={})
        return _compute_digest(session)


def _compute_digest(session: TrainingSession) -> str:
    digest = hashlib.sha256()
    for name, parameter in session.model.parameters.items():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
