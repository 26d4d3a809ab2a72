"""Random faults on one run, for SWARMTRAIN_SOAK minutes: `make soak`. The result must equal that of an undisturbed run.

The faults follow from SWARMTRAIN_SEED, or from a seed that is printed. At the end the same run is repeated without faults, and the
audit files of the two are compared.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from chaos_run import NODES, ChaosRun
from faults import FAULTS
from run_audit import find_problems
from test_chaos import audit_root, lab, start_run  # noqa: F401  # fixtures

_STEPS_PER_MINUTE = 600
_QUIET_LAST_STEPS = 250
"""No fault is injected in this many last steps."""
_STEADY_STEPS = 30
_RECOVERY_SECONDS = 90.0


def test_soak(start_run: Callable[..., ChaosRun]) -> None:  # noqa: F811  # the fixture
    minutes = float(os.environ.get("SWARMTRAIN_SOAK") or 30)
    seed = int(os.environ.get("SWARMTRAIN_SEED") or time.time())
    steps, rng = int(minutes * _STEPS_PER_MINUTE), random.Random(seed)  # noqa: S311  # no secret
    disk = rng.choice(("shared", "node-local"))
    faults = [fault for fault in FAULTS if disk in fault.disks and not fault.settings]
    print(f"SEED={seed}, {steps} steps, {disk} disk", flush=True)
    long = (f"trainer.train_iterations={steps}", "runner.max_restarts_per_hour=100000")
    scene = start_run("soak", "replicated", *long, disk=disk)
    allowed = 0
    while _can_inject_another_fault(scene, steps):
        fault = rng.choice(faults)
        print(f"{time.strftime('%H:%M:%S')} step {scene.step}: {fault.name}", flush=True)
        fault.inject(scene)
        allowed += fault.max_lost_replicated
    assert scene.wait_for_end(60 * minutes) == 0, "the run did not end well"
    audit = scene.audit
    print(
        f"{audit.lost_steps} steps lost of {allowed} that were allowed, {len(audit.world_sizes)} worlds of {audit.world_sizes} ranks",
        flush=True,
    )
    undisturbed = start_run("calm", "replicated", "runner.min_nodes=3", "runner.max_nodes=3", long[0])
    assert undisturbed.wait_for_end(60 * minutes) == 0
    assert find_problems(audit, undisturbed.audit, tolerance=1e-5) == []
    assert audit.lost_steps <= allowed


def _can_inject_another_fault(scene: ChaosRun, steps: int) -> bool:
    """Wait until the run makes steps again, preferably with all nodes. Return whether enough steps are left for another fault."""
    generation, step, end = scene.generation, scene.step, time.monotonic() + _RECOVERY_SECONDS
    while True:
        time.sleep(1)
        audit = scene.audit
        newest = max(audit.worlds, default=0)
        ranks = len({line.rank for lines in audit.worlds.get(newest, {}).values() for line in lines})
        if scene.step >= steps - _QUIET_LAST_STEPS:
            return False
        is_training = (
            scene.step >= step + _STEADY_STEPS if newest == generation else scene.step >= min(audit.worlds[newest]) + _STEADY_STEPS
        )
        if is_training and (ranks == len(NODES) or time.monotonic() > end):
            return True
        assert time.monotonic() < end + 5 * _RECOVERY_SECONDS, "training does not resume"
