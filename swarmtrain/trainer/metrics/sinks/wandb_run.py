"""Weights & Biases sink, enabled by logger.use_wandb. An unreachable W&B service never stops training."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarmtrain.config import Config
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.metrics_lines import SAMPLES_KEY, GeneratedSample, ResumeHistory, extract_samples
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
API_KEY_SECRET = "WANDB_API_KEY"  # noqa: S105  # the name of a secret
_CONNECT_TIMEOUT_SECONDS, _CLOSE_TIMEOUT_SECONDS = 10, 30


class WandbRun:
    """Logs metrics to one W&B run, which continues across restarts.

    The W&B service cannot delete history, and accepts steps only in ascending order. So steps after the resumed step that an earlier world
    has logged remain in an online run. An offline run cannot be resumed: each world writes a file, and recomputed steps are in two of them.
    """

    def __init__(self, runtime: Runtime, folder: Path, history: ResumeHistory) -> None:
        """Start or resume the W&B run. Its files are stored in `folder`.

        Raises TrainingError if wandb is not installed, if there is no API key in online mode, or if `folder` cannot be written.
        """
        try:
            import wandb
        except ImportError:
            raise TrainingError(
                "wandb is not installed", place="config logger.use_wandb", hint="pip install wandb, also in the image"
            ) from None
        key = runtime.read_secret(API_KEY_SECRET)
        offline = runtime.config.logger.wandb_offline or os.environ.get("WANDB_MODE") == "offline"
        if not offline and not key:
            raise TrainingError(
                "needs an API key, but this run has none",
                place="config logger.use_wandb",
                hint=f"set runner.secrets: {{{API_KEY_SECRET}: path/of/a/file}}, or logger.wandb_offline: true",
            )
        run_id = _load_or_create_run_id(runtime.config, runtime.run_name, folder)
        self._run: Any = None
        self._min_step = 0
        """Lowest step that the W&B run still accepts."""
        if not offline and not _is_url_reachable(runtime.config.logger.wandb_host):
            LOG.warning(
                "wandb: %s is unreachable, so the files of the W&B run remain in %s; upload them with `wandb sync`",
                runtime.config.logger.wandb_host,
                folder,
            )
            offline = True
        try:
            self._run = wandb.init(id=run_id, **_build_init_options(wandb, runtime, folder, "offline" if offline else "online", key))
            # The W&B service, or the files of earlier worlds, already have the earlier steps.
            self._min_step = history.step + 1 if offline and history.step else self._run.step
        except Exception as error:  # noqa: BLE001  # the client may raise any error; training continues
            LOG.warning("wandb: disabled, since it could not be started: %s", str(error).replace(key, "***") if key else error)
            _kill_wandb_service()
        # Log again the lines that the wandb process may not have sent when an earlier world was killed.
        for line in history.lines:
            self.write_metrics(line)

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Log `metrics_line`, unless the W&B run already contains a later step."""
        if metrics_line["step"] >= self._min_step:
            self._min_step = metrics_line["step"]
            if samples := extract_samples(metrics_line):
                metrics_line = {**metrics_line, SAMPLES_KEY: self._build_samples_table(samples)}
            self._call_wandb_or_disable_sink("log", metrics_line, self._min_step)

    def _build_samples_table(self, samples: Sequence[GeneratedSample]) -> Any:
        import wandb

        return wandb.Table(columns=list(samples[0]), data=[list(sample.values()) for sample in samples])

    def close(self) -> None:
        """Send pending metrics, for at most 30 s. Metrics that could not be sent remain on disk."""
        thread = threading.Thread(target=self._call_wandb_or_disable_sink, args=("finish",), daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_SECONDS)
        if thread.is_alive():
            LOG.warning("wandb: some metrics were not uploaded; run `wandb sync` on log_dir")
            _kill_wandb_service()

    def _call_wandb_or_disable_sink(self, method: str, *arguments: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments)
        except Exception as error:  # noqa: BLE001  # as above
            LOG.warning("wandb: disabled after an error: %s", error)
            self._run = None


def _build_init_options(wandb: Any, runtime: Runtime, folder: Path, mode: str, api_key: str | None) -> dict[str, Any]:
    logger = runtime.config.logger
    return {
        "mode": mode,
        "project": logger.wandb_project,
        "entity": logger.wandb_team,
        "group": logger.wandb_group,
        "name": runtime.run_name,
        "tags": logger.wandb_tags,
        "resume": "allow" if mode == "online" else None,
        "dir": str(folder),
        "config": runtime.config.model_dump(mode="json"),
        "settings": wandb.Settings(
            api_key=api_key if mode == "online" else None,
            base_url=logger.wandb_host,
            init_timeout=_CONNECT_TIMEOUT_SECONDS,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
        ),
    }


def _kill_wandb_service() -> None:
    """Kill the W&B service process that wandb has started.

    Otherwise the service would retry for minutes, and this process would wait for it at exit.
    """
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            with contextlib.suppress(OSError):
                if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


def _is_url_reachable(url: str) -> bool:
    """Return whether a TCP connection to `url` succeeds.

    Checked before wandb starts: after a failed start the W&B service process retries for minutes, and prevents this process from exiting.
    """
    address = urlsplit(url)
    try:
        socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), timeout=_CONNECT_TIMEOUT_SECONDS
        ).close()
    except OSError:
        return False
    return True


def _load_or_create_run_id(config: Config, run_name: str, folder: Path) -> str:
    """Return the id of the W&B run. It is created when the run first starts, and stored next to the checkpoints.

    Raises TrainingError if the id cannot be read or written.
    """
    path = (config.trainer.save_dir or folder) / "wandb-id"
    try:
        for directory in (folder, path.parent):
            directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(f"{re.sub(r'[^A-Za-z0-9-]+', '-', run_name)[:40]}-{secrets.token_hex(4)}\n")
        return path.read_text().strip()
    except OSError as error:
        hint = "give the training user write access to it"
        raise TrainingError(f"{error.filename}: {describe_os_error(error)}", place="config logger.use_wandb", hint=hint) from None
