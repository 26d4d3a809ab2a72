"""Weights & Biases, behind logger.use_wandb. Its service being away never stops training."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
KEY = "WANDB_API_KEY"
_PATIENCE, _LEAVE = 10, 30


class WandbRun:
    """One run at W&B, the same over every restart."""

    def __init__(self, here: Runtime, folder: Path) -> None:
        """Start it, or take it up again. Its files are kept in `folder`.

        Raises TrainingError if wandb is not installed, or if it is to be online and has no key.
        """
        try:
            import wandb
        except ImportError:
            raise TrainingError(
                "wandb is not installed", place="config logger.use_wandb", hint="pip install wandb, in the image too"
            ) from None
        key = here.secret(KEY)
        offline = here.config.logger.wandb_offline or os.environ.get("WANDB_MODE") == "offline"
        if not offline and not key:
            raise TrainingError(
                "has no key",
                place="config logger.use_wandb",
                hint=f"runner.secrets: {{{KEY}: path/of/a/file}}, or logger.wandb_offline: true",
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = None
        if not offline and not _answers(here.config.logger.wandb_host):
            LOG.warning(
                "wandb: %s does not answer, so its files stay in %s; `wandb sync` sends them", here.config.logger.wandb_host, folder
            )
            offline = True
        try:
            self._run = wandb.init(**_options(wandb, here, folder, "offline" if offline else "online", key))
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # noqa: BLE001  # whatever its client raises: training goes on
            LOG.warning("wandb: not used, %s", str(error).replace(key, "***") if key else error)
            _end_service()

    def write(self, values: dict[str, Any]) -> None:
        """Report `values`, one of which is `step`."""
        self._try("log", values)

    def close(self) -> None:
        """Send what is left, for at most half a minute; the rest is on disk."""
        sending = threading.Thread(target=self._try, args=("finish",), daemon=True)
        sending.start()
        sending.join(_LEAVE)
        if sending.is_alive():
            LOG.warning("wandb: not all is sent yet; `wandb sync` takes it from log_dir")
            _end_service()

    def _try(self, method: str, *arguments: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments)
        except Exception as error:  # noqa: BLE001  # as above
            LOG.warning("wandb gives up: %s", error)
            self._run = None


def _options(wandb: Any, here: Runtime, folder: Path, mode: str, key: str | None) -> dict[str, Any]:
    logger = here.config.logger
    return {
        "mode": mode,
        "project": logger.wandb_project,
        "entity": logger.wandb_team,
        "group": logger.wandb_group,
        "name": here.run,
        "id": _id(here.config, here.run, folder),
        "resume": "allow",
        "dir": str(folder),
        "config": here.config.model_dump(mode="json"),
        "settings": wandb.Settings(
            api_key=key if mode == "online" else None,
            base_url=logger.wandb_host,
            init_timeout=_PATIENCE,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
        ),
    }


def _end_service() -> None:
    """End the process that wandb keeps beside ours. It would retry for minutes, and our exit waits for its end."""
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            with contextlib.suppress(OSError):
                if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


def _answers(url: str) -> bool:
    """Ask before wandb does: a start that failed keeps its process busy with retries for minutes, and ours from ending."""
    address = urlsplit(url)
    try:
        socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), timeout=_PATIENCE
        ).close()
    except OSError:
        return False
    return True


def _id(config: Config, run: str, folder: Path) -> str:
    """Return the run's id, made at its first start and kept beside its checkpoints."""
    path = (config.trainer.save_dir or folder) / "wandb-id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        name = f"{re.sub(r'[^A-Za-z0-9-]+', '-', run)[:40]}-{secrets.token_hex(4)}"
        path.write_text(name + "\n")
        return name
