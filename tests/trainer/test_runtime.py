"""A rank's runtime: stores of successive attempts, the config's origin, the user's options, secrets, signals."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch.distributed import TCPStore
from worlds import LocalWorld

from swarmtrain.config import Config
from swarmtrain.errors import ConfigError, SwarmtrainError, TrainingError
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.random_seeds import seed_everything
from swarmtrain.trainer.runtime import Runtime, _create_store, read_config, read_options, set_collective_timeout, start_runtime


class ScriptOptions(BaseModel, extra="forbid"):
    colour: Literal["red", "blue"] = "red"


def build_runtime(secrets: dict[str, str]) -> Runtime:
    return Runtime(Config(), 0, 1, 0, torch.device("cpu"), "run", "node0", None, secrets)


@pytest.mark.parametrize(("agents", "shared"), [(1, False), (2, True)])
def test_attempts_of_one_agent_do_not_share_keys(monkeypatch: pytest.MonkeyPatch, agents: int, shared: bool) -> None:
    """With several agents restart counts differ, so that a prefix made from them would keep ranks apart forever."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**environ, "GROUP_WORLD_SIZE": str(agents)}.items():
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        stores.append(_create_store(build_runtime({})))
    stores[0].set("address of rank 0", "stale")
    stores[0].get("address of rank 0")  # set alone does not wait for the server
    assert stores[1].check(["address of rank 0"]) is shared


def test_the_launchers_config_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(Config.model_validate_json('{"trainer": {"seed": 7}}').to_json())
    (tmp_path / "config.yml").write_text("trainer: {seed: 8}")
    assert read_config([str(tmp_path / "config.yml")]).trainer.seed == 8
    assert read_config([str(tmp_path / "config.yml"), "-o", "trainer.seed=9"]).trainer.seed == 9
    monkeypatch.setenv("SWARMTRAIN_CONFIG", str(tmp_path / "config.json"))
    assert read_config(["an argument of the script's own"]).trainer.seed == 7


def test_no_config_at_all() -> None:
    with pytest.raises(SwarmtrainError, match="needs a config"):
        read_config([])


def test_the_users_options() -> None:
    good, bad = (Config.model_validate_json(f'{{"script": {{"colour": "{colour}"}}}}') for colour in ("blue", "green"))
    assert read_options(ScriptOptions, good).colour == "blue"
    with pytest.raises(ConfigError, match=r"config script\.colour: must be 'red' or 'blue'"):
        read_options(ScriptOptions, bad)


def test_secrets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    assert build_runtime({"TOKEN": str(tmp_path / "token")}).read_secret("TOKEN") == "sesame"
    assert build_runtime({}).read_secret("TOKEN") is None
    with pytest.raises(TrainingError, match="secret TOKEN"):
        build_runtime({"TOKEN": str(tmp_path / "nothing")}).read_secret("TOKEN")


def test_seeds_repeat() -> None:
    seed_everything("a", 1)
    first = torch.rand(3)
    seed_everything("a", 2)
    second = torch.rand(3)
    seed_everything("a", 1)
    assert torch.equal(first, torch.rand(3))
    assert not torch.equal(first, second)


def test_stop_flag() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_interrupt_stops_at_once() -> None:
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ranks_of_which_some_have_no_gpu_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """Each device type has its own backend, which would wait for the ranks without that device."""
    world = LocalWorld(tmp_path, config, 2, {"SWARMTRAIN_NODE": "node7"}, script="mixed_devices")
    assert world.wait() == [1, 1]
    assert world.read_log().count("TrainingError: rank 1 on node7: sees no GPU, but other ranks of this run do") == 2


@pytest.mark.parametrize("script", ["training_code", pytest.param("custom_script", marks=pytest.mark.test_all_only("the same with run()"))])
def test_a_run_that_uses_gpus_never_trains_on_cpus(config: dict[str, Any], tmp_path: Path, script: str) -> None:
    world = LocalWorld(tmp_path, config, 1, {"SWARMTRAIN_NODE": "node7", "SWARMTRAIN_GPUS": "8+"}, script=script)
    assert world.wait() == [1]
    reason = "the run uses GPUs, but torch cannot use CUDA: "  # followed by the words of torch, which depend on its build
    assert f"TrainingError: node node7: {reason}" in world.read_log() or f"error: node node7: {reason}" in world.read_log()
    assert "step 1" not in world.read_log()


class _GroupOverNccl:
    """A process group with a backend for each type of device, as on GPUs."""

    def __init__(self, gloo_backend: object) -> None:
        self._gloo_backend = gloo_backend

    def _get_backend(self, device: torch.device) -> object:
        return self._gloo_backend if device.type == "cpu" else pytest.fail("the timeout of NCCL is torch's")


def test_the_timeout_is_that_of_collectives_over_gloo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[timedelta] = []
    monkeypatch.setattr(dist.ProcessGroupGloo, "_set_default_timeout", lambda _backend, timeout: timeouts.append(timeout))
    with start_runtime(Config()):
        gloo_backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        for group in (_GroupOverNccl(gloo_backend), _GroupOverNccl(object())):
            set_collective_timeout(12.0, [group])  # type: ignore[list-item]  # it has the method that is called
    assert timeouts == [timedelta(seconds=12)]
