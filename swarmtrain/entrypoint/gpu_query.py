"""Query the GPUs of this container with nvidia-smi: one process for each sample. Standard library only.

nvidia-smi refuses a query that contains a field which the driver does not know. Such a field is replaced by its older name, or left out,
and not queried again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmtrain.errors import ProcessError
from swarmtrain.process import run_command

_NVIDIA_SMI = "nvidia-smi"
# As listed by nvidia-smi --help-query-gpu. The oldest drivers know the first three.
_FIELDS = (
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "clocks_event_reasons.active",
    "uuid",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_OLDER_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
_REMAP_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_SAMPLES_PER_REMAP_QUERY = 2
"""Number of samples between two queries of remapped rows, which need a process of their own."""
_TIMEOUT_SECONDS = 5.0
_TIMEOUT_EXIT_CODE = 124  # as run_command reports it
_UNKNOWN_FIELD_PATTERN = re.compile(r'Field "([^"]+)" is not a valid field')


@dataclass(frozen=True)
class GpuSample:
    """One sample: the fields of each GPU by their current names, as text; or nvidia-smi's `error` message. Neither without nvidia-smi."""

    gpus: tuple[Mapping[str, str], ...] = ()
    error: str = ""


class GpuQuery:
    """Queries the GPUs; each call of `read_sample` returns a new sample."""

    def __init__(self, timeout: float = _TIMEOUT_SECONDS) -> None:
        """Create a query that waits at most `timeout` seconds for each nvidia-smi."""
        self._timeout = timeout
        self._columns = {name: name for name in _FIELDS}  # the field to query by its current name
        self._sample_count = 0
        self._has_row_remapping = True
        self._remapped_rows: dict[str, dict[str, str]] = {}

    def read_sample(self) -> GpuSample:
        """Return the present values of all GPUs. If nvidia-smi does not answer in time, the sample is empty."""
        if shutil.which(_NVIDIA_SMI) is None:
            return GpuSample()
        if self._has_row_remapping and self._sample_count % _SAMPLES_PER_REMAP_QUERY == 0:
            self._read_remapped_rows()
        self._sample_count += 1
        while True:
            try:
                lines = _run_query("--query-gpu", tuple(self._columns.values()), self._timeout)
            except ProcessError as error:
                if self._replace_unknown_field(error.output):
                    continue
                return GpuSample(error="" if error.returncode == _TIMEOUT_EXIT_CODE else _summarize_output(error))
            gpus = [dict(zip(self._columns, row, strict=False)) for row in lines]
            return GpuSample(tuple({**gpu, **self._remapped_rows.get(gpu.get("uuid", ""), {})} for gpu in gpus))

    def _replace_unknown_field(self, output: str) -> bool:
        """Replace or leave out the field that nvidia-smi does not know. Return whether `output` names one."""
        match = _UNKNOWN_FIELD_PATTERN.search(output)
        name = next((name for name, field in self._columns.items() if match and field == match[1]), None)
        if name is None:
            return False
        older_name = _OLDER_NAMES.get(name)
        if older_name is None or older_name == self._columns[name]:
            del self._columns[name]
        else:
            self._columns[name] = older_name
        return True

    def _read_remapped_rows(self) -> None:
        try:
            rows = _run_query("--query-remapped-rows", _REMAP_FIELDS, self._timeout)
        except ProcessError as error:
            self._has_row_remapping = error.returncode == _TIMEOUT_EXIT_CODE  # GPUs before Ampere retire pages instead
            return
        self._remapped_rows = {row[0]: dict(zip(_REMAP_FIELDS[1:], row[1:], strict=False)) for row in rows}
        self._has_row_remapping = any(not cell.startswith("[") for row in rows for cell in row[1:])


def _run_query(option: str, fields: Sequence[str], timeout: float) -> list[list[str]]:
    output = run_command([_NVIDIA_SMI, f"{option}={','.join(fields)}", "--format=csv,noheader,nounits"], timeout=timeout)
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]


def _summarize_output(error: ProcessError) -> str:
    lines = error.output.strip().splitlines()
    return lines[0] if lines else f"exit code {error.returncode}"
