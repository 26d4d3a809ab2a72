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
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarmtrain.config import Config
from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks import offline_files
from swarmtrain.trainer.metrics.sinks.past import Past
from swarmtrain.trainer.metrics.sinks.texts import NAME, Sample, texts
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
KEY = "WANDB_API_KEY"
_PATIENCE, _LEAVE = 10, 30


class WandbRun:
    """One run at W&B, the same over every restart, whose step is ours.

    Its service forgets nothing and takes steps in their order alone: those that it has from an earlier world stand. The
    files of a run that is offline are cut off instead.
    """

    def __init__(self, here: Runtime, folder: Path, past: Past) -> None:
        """Start it, or take it up again. Its files are kept in `folder`.

        Raises TrainingError if wandb is not installed, if it is to be online and has no key, or if `folder` cannot be written.
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
        name = _id(here.config, here.run, folder)
        self._run: Any = None
        self._step = 0
        """The earliest that is still taken."""
        if not offline and not _answers(here.config.logger.wandb_host):
            LOG.warning(
                "wandb: %s does not answer, so its files stay in %s; `wandb sync` sends them", here.config.logger.wandb_host, folder
            )
            offline = True
        try:
            told = offline_files.cut_off(folder / "wandb", name, past.step) if offline else None
            self._run = wandb.init(id=name, **_options(wandb, here, folder, "offline" if offline else "online", key))
            if told is not None:
                self._step = told + 1
            else:  # a run that was online until now has told of the past
                self._step = past.step + 1 if offline and past.step else self._run.step
        except Exception as error:  # noqa: BLE001  # whatever its client raises: training goes on
            LOG.warning("wandb: not used, %s", str(error).replace(key, "***") if key else error)
            _end_service()
        # What its own process had not brought away yet when a world was killed.
        for line in past.lines:
            self.write(line)

    def write(self, values: dict[str, Any]) -> None:
        """Report `values`, one of which is `step`."""
        if values["step"] >= self._step:
            self._step = values["step"]
            if samples := texts(values):
                values = {**values, NAME: self._table(samples)}
            self._try("log", values, self._step)

    def _table(self, samples: Sequence[Sample]) -> Any:
        import wandb

        return wandb.Table(columns=list(samples[0]), data=[list(sample.values()) for sample in samples])

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
        "tags": logger.wandb_tags,
        "resume": "allow" if mode == "online" else None,
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
    """Return the run's id, made at its first start and kept beside its checkpoints. Raises TrainingError."""
    path = (config.trainer.save_dir or folder) / "wandb-id"
    try:
        for each in (folder, path.parent):
            each.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(f"{re.sub(r'[^A-Za-z0-9-]+', '-', run)[:40]}-{secrets.token_hex(4)}\n")
        return path.read_text().strip()
    except OSError as error:
        hint = "the user that trains needs write access to it"
        raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.use_wandb", hint=hint) from None
