"""Faults at random on one run, for SWARMTRAIN_SOAK minutes: `make soak`. It must end as if nothing had happened.

What is drawn follows from SWARMTRAIN_SEED, or from a seed that is printed. At the end the same run is made undisturbed, and the
two are compared by their audit files.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from audit import problems
from faults import FAULTS
from scene import NODES, Scene
from test_chaos import audits, begin, lab  # noqa: F401  # fixtures

_STEPS_A_MINUTE = 600
_LAST = 250
"""Steps before the end after which nothing is struck any more."""
_STEADY = 30
_WITHIN = 90.0


def test_soak(begin: Callable[..., Scene]) -> None:  # noqa: F811  # the fixture
    minutes = float(os.environ.get("SWARMTRAIN_SOAK") or 30)
    seed = int(os.environ.get("SWARMTRAIN_SEED") or time.time())
    steps, draw = int(minutes * _STEPS_A_MINUTE), random.Random(seed)  # noqa: S311  # no secret
    disk = draw.choice(("shared", "own"))
    faults = [fault for fault in FAULTS if disk in fault.disks]
    print(f"SEED={seed}, {steps} steps, {disk} disk", flush=True)
    long = (f"trainer.train_iterations={steps}", "runner.max_restarts_per_hour=100000")
    scene = begin("soak", "replicated", *long, disk=disk)
    allowed = 0
    while _has_room(scene, steps):
        fault = draw.choice(faults)
        print(f"{time.strftime('%H:%M:%S')} step {scene.step}: {fault.name}", flush=True)
        fault.strike(scene)
        allowed += fault.replicated
    assert scene.end(60 * minutes) == 0, "the run did not end well"
    story = scene.story
    print(f"{story.lost} steps lost of {allowed} that were allowed, {len(story.sizes)} worlds of {story.sizes} ranks", flush=True)
    calm = begin("calm", "replicated", "runner.min_nodes=3", "runner.max_nodes=3", long[0])
    assert calm.end(60 * minutes) == 0
    assert problems(story, calm.story, tolerance=1e-5) == []
    assert story.lost <= allowed


def _has_room(scene: Scene, steps: int) -> bool:
    """Wait until the run makes steps again, with all nodes if that is soon; return whether there is room for one more fault."""
    token, step, end = scene.token, scene.step, time.monotonic() + _WITHIN
    while True:
        time.sleep(1)
        story = scene.story
        newest = max(story.worlds, default=0)
        ranks = len({line.rank for lines in story.worlds.get(newest, {}).values() for line in lines})
        if scene.step >= steps - _LAST:
            return False
        goes_on = scene.step >= step + _STEADY if newest == token else scene.step >= min(story.worlds[newest]) + _STEADY
        if goes_on and (ranks == len(NODES) or time.monotonic() > end):
            return True
        assert time.monotonic() < end + 5 * _WITHIN, "training does not go on"
