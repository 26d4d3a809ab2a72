"""Repeated and resumed runs, compared bit by bit, with each value of trainer.deterministic."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from swarmtrain.trainer.acceptance.models import DOCUMENTS, merge_sections
from swarmtrain.trainer.acceptance.rows import Row
from swarmtrain.trainer.acceptance.session import Sections, TrainingSession, build_config, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_worker
from swarmtrain.trainer.loop import train_model

_STEPS, _STOPPED_STEPS = 6, 3
_MODES = ("ignore", "prefer", "require")
_SIZES = {
    "cuda": {"vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "num_attention_heads": 4, "sequence_length": 1024},
    "cpu": {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 64},
}


def run(context: StageContext) -> Iterator[Row]:
    """Yield two rows for each mode: plain attention, and attention within documents."""
    for mode in _MODES:
        yield from run_worker(
            compare_runs,
            {"device_type": context.device_type, "folder": str(Path(context.folder) / mode), "mode": mode},
            timeout=context.scale_limit(60),
        )


def compare_runs(device_type: str, folder: str, mode: str) -> Iterator[Row]:
    """Train a model twice without and once with an interruption, and compare the parameters after the last step."""
    for name, variant in (("plain attention", {}), ("documents", DOCUMENTS)):
        row_name = f"{mode}, {name}"
        try:
            yield _compare(row_name, Path(folder) / name, device_type, mode, variant)
        except Exception as error:  # noqa: BLE001  # the other variant is still checked
            yield Row.from_error(row_name, error)


def _compare(row_name: str, folder: Path, device_type: str, mode: str, variant: Sections) -> Row:
    sections = merge_sections(
        {
            "topology": {"global_batch_size": 4, "micro_batch_size": 2},
            "learning_rate_scheduler": {"learning_rate": 1e-3, "learning_rate_decay_style": "constant"},
            "transformer_architecture": {"precision": "bfloat16", **_SIZES[device_type]},
            "trainer": {"deterministic": mode, "save_interval": None, "train_iterations": _STEPS},
            "logger": {"log_interval": 1000},
        },
        variant,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = _train(sections, folder / "first", _STEPS)
        repeated = _train(sections, folder / "repeated", _STEPS)
        _train(sections, folder / "resumed", _STOPPED_STEPS)
        resumed = _train(sections, folder / "resumed", _STEPS)
    nondeterministic = sorted({str(each.message).split(" ")[0] for each in caught if "deterministic" in str(each.message)})
    values = {"repeated_equal": repeated == first, "resumed_equal": resumed == first, "warnings": ", ".join(nondeterministic)[:200]}
    if mode == "require":
        return Row.from_check(row_name, first == repeated == resumed, values, "the parameters differ")
    return Row(row_name, values=values)  # prefer excludes the gradients of attention


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
