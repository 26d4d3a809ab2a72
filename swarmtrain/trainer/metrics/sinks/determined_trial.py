"""Integration with Determined AI: if the run is a trial, its metrics are reported to the Determined master, which may preempt it.

No setting is needed: Determined's containers contain its Python package, and environment variables that identify a trial.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.protocol import EXIT_PLANNED, distributed_env
from swarmtrain.trainer import collectives
from swarmtrain.trainer.metrics.sinks.metrics_lines import extract_samples
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_POLL_SECONDS, _CLOSE_TIMEOUT_SECONDS = 0.2, 30.0
"""Seconds between two checks for a preemption request, and maximum seconds to send pending metrics when the run ends."""


class DeterminedTrial:
    """Reports rank 0's metrics to the Determined master, and polls it for preemption. A no-op on other ranks, and outside a trial."""

    def __init__(self, runtime: Runtime) -> None:
        """Connect to the Determined master, on rank 0 of a trial. Collective: all ranks must call it.

        Raises TrainingError on every rank if the connection fails.
        """
        self._log_interval, self._total_steps = runtime.config.logger.log_interval, runtime.config.trainer.train_iterations
        self._context: Any = None
        self._preemption_requested = self._reporting_failed = False
        if distributed_env.is_determined_trial(os.environ):
            collectives.run_on_rank_zero(self._connect_to_master)

    def should_preempt(self) -> bool:
        """Return whether the Determined master has requested preemption."""
        return self._preemption_requested

    def acknowledge_preemption(self) -> int:
        """Acknowledge a requested preemption, and return the exit code for a graceful exit.

        Called by all ranks together, after the last step is saved. The acknowledgment makes the Determined master restart the trial later.
        The exit code is then 0, since the master would treat any other exit code as a failure. In all other cases it is EXIT_PLANNED.
        """
        return (
            EXIT_PLANNED
            if not distributed_env.is_determined_trial(os.environ) or not collectives.run_on_rank_zero(self._send_preemption_acknowledgment)
            else 0
        )

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Report `metrics_line` to the Determined master.

        Validation losses are reported as validation metrics. Other metrics are reported as training metrics, at logged steps.
        """
        if self._context is None or self._reporting_failed or extract_samples(metrics_line):
            return
        step, metrics = metrics_line["step"], {name: value for name, value in metrics_line.items() if name != "step" and value is not None}
        if "validation_loss" in metrics:
            self._run_and_log_error(lambda: self._context.train.report_validation_metrics(step, metrics))
        elif step % self._log_interval == 0 or step == self._total_steps:
            self._run_and_log_error(lambda: self._context.train.report_training_metrics(step, metrics))

    def close(self) -> None:
        """Send pending metrics, for at most 30 s, and disconnect."""
        if self._context is not None:
            self._run_with_timeout(self._context.close)

    def _connect_to_master(self) -> None:
        try:
            from determined import core
        except ImportError:
            raise TrainingError("determined is not installed", place="Determined trial", hint="pip install determined") from None
        try:
            # The ranks agree on preemption among themselves, so only rank 0 is registered with Determined.
            self._context = core.init(
                distributed=core.DummyDistributedContext(),
                preempt_mode=core.PreemptMode.ChiefOnly,
                tensorboard_mode=core.TensorboardMode.MANUAL,
            )
            self._context.start()
        except Exception as error:  # Determined's client may raise any error
            raise TrainingError(
                str(error), place="Determined trial", hint="make the Determined master reachable from the container"
            ) from error
        threading.Thread(target=self._run_and_log_error, args=(self._poll_preemption,), daemon=True).start()

    def _poll_preemption(self) -> None:
        """Wait until the Determined master requests preemption.

        Runs in its own thread, since the first response of an unreachable master takes minutes.
        """
        while not self._context.preempt.should_preempt(auto_ack=False):
            time.sleep(_POLL_SECONDS)
        self._preemption_requested = True

    def _send_preemption_acknowledgment(self) -> bool:
        return self._preemption_requested and self._run_with_timeout(self._context.preempt.acknowledge_preemption_signal)

    def _run_with_timeout(self, action: Callable[[], object]) -> bool:
        """Run `action` in a thread, and wait for at most 30 s. Return whether it succeeded."""
        outcomes: list[bool] = []
        thread = threading.Thread(target=lambda: outcomes.append(self._run_and_log_error(action)), daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_SECONDS)
        return outcomes == [True]

    def _run_and_log_error(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # the client may raise any error; training continues
            LOG.warning("Determined: metrics are no longer reported: %s", error)
            self._reporting_failed = True
            return False
        return True
