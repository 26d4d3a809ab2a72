"""Helpers for tests of real training runs on a swarm: small quickstarts, and what they wrote to the shared disk."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import run_audit

from swarmtrain import protocol
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.protocol import Event

ROOT = Path(__file__).parents[2]
# About 30 s on a fast machine: long enough to add a node during the run.
STEPS = 400
# Enough for all other tests.
FEW_STEPS = 160
SMALL_OPTIONS = [
    f"trainer.train_iterations={FEW_STEPS}",
    f"learning_rate_scheduler.learning_rate_decay_iters={STEPS}",
    "trainer.save_interval=20",
    "trainer.eval_interval=null",
    "trainer.eval_iterations=2",
    "logger.log_interval=50",
    "transformer_architecture.hidden_size=64",
    "transformer_architecture.num_layers=2",
    "transformer_architecture.sequence_length=128",
    "transformer_architecture.precision=float32",
]
# A process is killed after this step at the earliest, with more steps to come.
MIDDLE_STEP = 20


def build_options(image: str, run: str, *extra_settings: str) -> list[str]:
    paths = f"trainer.save_dir=runs/{run}", f"logger.audit_dir=runs/{run}/audit"
    values = [*SMALL_OPTIONS, f"runner.docker_config.docker_container={image}", *paths, *extra_settings]
    return [word for value in values for word in ("-o", value)]


def start_swarmtrain(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT)


def read_losses(lab: Lab, run: str) -> dict[int, float]:
    """Return step → loss as the run wrote them; a step that occurs twice is an error."""
    lines = [json.loads(line) for line in (lab.shared_disk / run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "learning_rate" in line]
    assert steps == sorted(set(steps)), "steps are missing order, or stand twice"
    return {line["step"]: line["loss"] for line in lines if "learning_rate" in line}


def assert_nothing_recomputed(lab: Lab, run: str) -> None:
    """Assert that there were at least two worlds, and that no step was recomputed."""
    history = run_audit.read_audit(lab.shared_disk / run / "audit")
    assert len(history.worlds) >= 2
    assert history.lost_steps == 0


def assert_same_losses(losses: dict[int, float], reference: dict[int, float], steps: int = FEW_STEPS) -> None:
    """Assert that each of the first `steps` steps is there, with the same loss within 1e-5 (relative)."""
    assert sorted(losses) == list(range(1, steps + 1))
    worst = max(abs(losses[step] / reference[step] - 1) for step in losses)
    print(f"largest relative difference of a loss over {steps} steps: {worst:.1e}")
    assert worst < 1e-5


def wait_for_events(launcher: SwarmLauncher, run: str, condition: Callable[[list[Event]], bool], seconds: float = 240) -> list[Event]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        events = launcher.read_events(run)
        if condition(events):
            return events
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s; the events: {[event.to_line() for event in launcher.read_events(run)]}")


def is_past_the_middle(events: list[Event]) -> bool:
    return any(event.kind == protocol.EVENT_CHECKPOINT and event.data["step"] >= MIDDLE_STEP for event in events)


def is_done(events: list[Event]) -> bool:
    return any(event.kind == protocol.EVENT_OUTCOME and event.data["status"] == "done" for event in events)
