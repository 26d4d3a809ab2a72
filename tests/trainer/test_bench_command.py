"""`python -m swarmtrain.trainer bench`: the step time of a config, in one process and under torchrun; missing data is generated."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from worlds import merge_config

BENCH = ["-m", "swarmtrain.trainer", "bench"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_bench(folder: Path, config: dict[str, Any], *argv: str, launcher: list[str], code: int = 0) -> str:
    (folder / "config.yml").write_text(json.dumps(config))
    command = [sys.executable, *launcher, *BENCH, "config.yml", *argv]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stderr if code else result.stdout


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.test_all_only("measures with several processes; the gate measures one rank"))]
)
def test_a_config_is_measured(tmp_path: Path, config: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = run_bench(tmp_path, config, "--steps", "4", "--warmup", "1", "--json", launcher=TORCHRUN if ranks == 2 else [])
    facts = json.loads(said.splitlines()[-1])
    assert (facts["ranks"], facts["steps"]) == (ranks, 4)
    tokens = config["topology"]["global_batch_size"] * config["transformer_architecture"]["sequence_length"]
    seconds = facts["step_seconds"]
    assert 0 < seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert tokens / seconds["p90"] * 0.5 < facts["tokens_per_second"] < tokens / seconds["p10"] * 2
    assert {"data", "forward", "backward", "communication", "optimizer"} <= facts["phases"].keys()
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.test_all_only("measures with several processes; the gate measures one rank")
def test_missing_data_is_generated_and_removed(tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    tempfile.tempdir = None
    nowhere = merge_config(config, data={"data_prefixes": ["nowhere"], "validation_data_prefixes": []})
    table = run_bench(tmp_path, nowhere, "-o", "topology.micro_batch_size=1", "--steps", "2", launcher=[])
    rows = {line[:16].strip(): line[16:] for line in table.splitlines()}
    assert rows["data"] == "synthetic: the config's data is not on this machine"
    assert rows["step"].endswith(" ms")
    assert not list((tmp_path / "tmp").glob("swarmtrain-bench-*"))
    texts = {"trainer": {"contrastive_config": {}}, "transformer_architecture": {"embedding_head_config": {}}}
    others = {"positive_prefixes": ["nowhere"], "negative_prefixes": ["nowhere", "nowhere"]}
    assert "synthetic" in run_bench(tmp_path, merge_config(nowhere, data=others, **texts), "--steps", "1", launcher=[])
    said = run_bench(tmp_path, merge_config(nowhere, topology={"micro_batch_size": 0}), launcher=[], code=1)
    assert "micro_batch_size" in said
    assert "Traceback" not in said
