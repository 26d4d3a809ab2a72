"""`python -m swarmtrain.trainer bench`: what a config's steps take, alone and under torchrun; where there is no data, it makes some."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from worlds import changed

BENCH = ["-m", "swarmtrain.trainer", "bench"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder: Path, config: dict[str, Any], *argv: str, before: list[str], code: int = 0) -> str:
    (folder / "config.yml").write_text(json.dumps(config))
    command = [sys.executable, *before, *BENCH, "config.yml", *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.test_all_only("measures with several processes; the gate measures one rank"))]
)
def test_a_config_is_measured(tmp_path: Path, config: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = run(tmp_path, config, "--steps", "4", "--warmup", "1", "--json", before=TORCHRUN if ranks == 2 else [])
    facts = json.loads(said.splitlines()[-1])
    assert (facts["ranks"], facts["steps"]) == (ranks, 4)
    tokens = config["topology"]["global_batch_size"] * config["transformer_architecture"]["sequence_length"]
    seconds = facts["step_seconds"]
    assert 0 < seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert tokens / seconds["p90"] * 0.5 < facts["tokens_per_second"] < tokens / seconds["p10"] * 2
    assert {"data", "forward", "backward", "communication", "optimizer"} <= facts["parts"].keys()
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.test_all_only("measures with several processes; the gate measures one rank")
def test_what_is_not_there_is_made_up_and_removed(tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    tempfile.tempdir = None
    nowhere = changed(config, data={"data_prefixes": ["nowhere"], "validation_data_prefixes": []})
    table = run(tmp_path, nowhere, "-o", "topology.micro_batch_size=1", "--steps", "2", before=[])
    rows = {line[:16].strip(): line[16:] for line in table.splitlines()}
    assert rows["data"] == "made up: the config's is not here"
    assert rows["step"].endswith(" ms")
    assert not list((tmp_path / "tmp").glob("swarmtrain-bench-*"))
    texts = {"trainer": {"contrastive_config": {}}, "transformer_architecture": {"embedding_head_config": {}}}
    others = {"positive_prefixes": ["nowhere"], "negative_prefixes": ["nowhere", "nowhere"]}
    assert "made up" in run(tmp_path, changed(nowhere, data=others, **texts), "--steps", "1", before=[])
    said = run(tmp_path, changed(nowhere, topology={"micro_batch_size": 0}), before=[], code=1)
    assert "micro_batch_size" in said
    assert "Traceback" not in said
