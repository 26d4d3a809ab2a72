"""Faults of GPUs, found in samples of nvidia-smi and in the kernel log. Standard library only.

A fault of the hardware makes the coordinator quarantine the node. Other findings are reported only: what the application caused, and what
makes a GPU slow.

Xid errors are classified as in NVIDIA, "Xid Errors" (https://docs.nvidia.com/deploy/xid-errors/); row remapping is explained in NVIDIA,
"GPU Memory Error Management" (https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarmtrain.entrypoint.gpu_query import GpuSample

THROTTLE_MASK = 0xE8
"""Bit mask of the clock event reasons for heat and insufficient power.

Excludes 0x1, an idle GPU, and 0x4, the software power cap, which full load reaches normally.
"""
_THROTTLE_REASONS = {
    0x08: "hardware slowdown (HW Slowdown)",
    0x20: "software thermal slowdown (SW Thermal Slowdown)",
    0x40: "hardware thermal slowdown (HW Thermal Slowdown)",
    0x80: "power brake (HW Power Brake Slowdown)",
}
_CONFIRMATION_SAMPLES = 2
"""Number of consecutive samples that must show a condition which may also be momentary."""
_XID_PATTERN = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
_LOST_GPU_PATTERN = re.compile(
    r"GPU is lost|device handle for GPU|fallen off the bus|No devices were found|GPU access blocked", re.IGNORECASE
)

_HARDWARE_XIDS = {
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    63: "a memory page was retired, or a row remapped",
    64: "a memory page could not be retired, or a row not remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained uncorrectable memory error",
    95: "uncontained uncorrectable memory error",
    119: "the GPU system processor (GSP) does not answer",
    120: "error of the GPU system processor (GSP)",
    140: "unrecovered ECC error",
}
_APPLICATION_XIDS = {
    13: "graphics engine exception",
    31: "illegal memory access (MMU fault)",
    43: "the GPU stopped processing a channel",
    45: "cleanup after an error or a killed process",
}
_RESET_HINT = "drain the machine and reset the GPU (nvidia-smi --gpu-reset), or reboot; replace the GPU if this recurs"
_COOLING_HINT = "check fans, air flow and power supply of the machine"
_APPLICATION_HINT = "usually a fault of the training code or of CUDA libraries, not of the GPU"


@dataclass(frozen=True)
class GpuFault:
    """A finding about one GPU. `kind` is equal for all findings of the same cause."""

    gpu: str
    """The GPU: its index and PCI address."""
    kind: str
    message: str
    hint: str = _RESET_HINT
    is_hardware: bool = True
    """Whether the GPU is faulty, so that the node should not train."""

    def __str__(self) -> str:
        return f"{self.gpu}: {self.message}" if self.gpu else self.message


class GpuHealthMonitor:
    """Finds faults in successive samples; each is returned once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the GPUs of the first sample with GPUs, by PCI address
        self._ecc_baseline: dict[str, int] = {}
        self._streaks: Counter[tuple[str, str]] = Counter()
        self._reported: set[tuple[str, str]] = set()

    def find_new_faults(self, sample: GpuSample, kernel_log_lines: Iterable[str]) -> list[GpuFault]:
        """Return the faults in `sample` and in the new lines of the kernel log that no earlier call has returned."""
        if sample.gpus and not self._names:
            self._names = {_get_pci_address(gpu): _format_gpu(index, gpu) for index, gpu in enumerate(sample.gpus)}
        permanent = [*_find_xids(kernel_log_lines, self._names), *self._find_permanent_conditions(sample)]
        momentary = [*self._find_lost_gpus(sample), *self._find_slow_gpus(sample)]
        self._streaks = Counter({_get_key(fault): self._streaks[_get_key(fault)] + 1 for fault in momentary})
        confirmed = [fault for fault in momentary if self._streaks[_get_key(fault)] >= _CONFIRMATION_SAMPLES]
        new_faults = {_get_key(fault): fault for fault in [*permanent, *confirmed] if _get_key(fault) not in self._reported}
        self._reported |= new_faults.keys()
        return list(new_faults.values())

    def _get_name(self, gpu: Mapping[str, str]) -> str:
        return self._names.get(_get_pci_address(gpu), f"GPU {_get_pci_address(gpu)}")

    def _find_permanent_conditions(self, sample: GpuSample) -> Iterator[GpuFault]:
        for gpu in sample.gpus:
            yield from _find_memory_faults(self._get_name(gpu), gpu)
            address, errors = _get_pci_address(gpu), _parse_integer(gpu.get("ecc.errors.uncorrected.volatile.total", ""))
            # Errors from before this run are reported by the doctor.
            new_errors = errors - self._ecc_baseline.setdefault(address, errors)
            if new_errors > 0:
                yield GpuFault(self._get_name(gpu), "ecc", f"{new_errors} uncorrected ECC error{'' if new_errors == 1 else 's'}")

    def _find_lost_gpus(self, sample: GpuSample) -> Iterator[GpuFault]:
        if not self._names:
            return
        if _LOST_GPU_PATTERN.search(sample.error):
            yield GpuFault("", "lost", f"nvidia-smi: {sample.error}")
        elif sample.error:
            hint = "restart the container, and check the driver: docker service update --force SERVICE"
            yield GpuFault("", "nvidia-smi", f"nvidia-smi fails: {sample.error}", hint, is_hardware=False)
        for gpu in sample.gpus:
            if text := next((cell for cell in gpu.values() if _LOST_GPU_PATTERN.search(cell)), ""):
                yield GpuFault(self._get_name(gpu), "lost", f"nvidia-smi: {text.strip('[]')}")
        addresses = {_get_pci_address(gpu) for gpu in sample.gpus}
        for address, name in self._names.items() if sample.gpus else ():
            if address not in addresses:
                yield GpuFault(name, "lost", f"nvidia-smi no longer lists it ({len(addresses)} GPUs, {len(self._names)} before)")

    def _find_slow_gpus(self, sample: GpuSample) -> Iterator[GpuFault]:
        for gpu in sample.gpus:
            yield from _find_slow_conditions(self._get_name(gpu), gpu)


def find_present_faults(sample: GpuSample, kernel_log_lines: Iterable[str]) -> list[GpuFault]:
    """Return all faults in one sample and in the kernel log since the machine started, for a machine on which no run is observed."""
    names = {_get_pci_address(gpu): _format_gpu(index, gpu) for index, gpu in enumerate(sample.gpus)}
    faults = [*_find_xids(kernel_log_lines, names)]
    if sample.error:
        faults.append(GpuFault("", "lost", f"nvidia-smi: {sample.error}", is_hardware=bool(_LOST_GPU_PATTERN.search(sample.error))))
    for gpu in sample.gpus:
        name = names[_get_pci_address(gpu)]
        if (errors := _parse_integer(gpu.get("ecc.errors.uncorrected.volatile.total", ""))) > 0:
            message = f"{errors} uncorrected ECC error{'' if errors == 1 else 's'} since the driver was loaded"
            faults.append(GpuFault(name, "ecc", message, is_hardware=False))
        faults += [*_find_memory_faults(name, gpu), *_find_slow_conditions(name, gpu)]
    return list({_get_key(fault): fault for fault in faults}.values())


def _find_xids(kernel_log_lines: Iterable[str], names: Mapping[str, str]) -> Iterator[GpuFault]:
    """Yield the Xid errors of this container's GPUs. The kernel log also has those of other runs' GPUs on the same machine."""
    for line in kernel_log_lines:
        match = _XID_PATTERN.search(line)
        address = _normalize_pci_address(match[1]) if match else ""
        if match is None or address not in names:
            continue
        number, details = int(match[2]), match[3].strip()
        meaning = _HARDWARE_XIDS.get(number) or _APPLICATION_XIDS.get(number) or "see NVIDIA's Xid catalog"
        is_hardware = number in _HARDWARE_XIDS
        hint = _RESET_HINT if is_hardware else _APPLICATION_HINT if number in _APPLICATION_XIDS else ""
        yield GpuFault(names[address], f"xid {number}", f"Xid {number}, {meaning}: {details}", hint, is_hardware)


def _find_memory_faults(name: str, gpu: Mapping[str, str]) -> Iterator[GpuFault]:
    if _parse_flag(gpu.get("remapped_rows.failure", "")):
        yield GpuFault(name, "remap failure", "a faulty memory row could not be remapped", "replace the GPU")
    for field, text in (
        ("remapped_rows.pending", "a remapped memory row is not in use yet"),
        ("retired_pages.pending", "a memory page is to be retired"),
    ):
        if _parse_flag(gpu.get(field, "")):
            yield GpuFault(name, field, f"{text}: the GPU must be reset", _RESET_HINT, is_hardware=False)


def _find_slow_conditions(name: str, gpu: Mapping[str, str]) -> Iterator[GpuFault]:
    reasons = parse_clock_event_reasons(gpu.get("clocks_event_reasons.active", ""))
    for bit, text in _THROTTLE_REASONS.items():
        if reasons & bit:
            message = f"clocks are reduced: {text}, {gpu.get('temperature.gpu', '?')} °C"
            yield GpuFault(name, f"throttle {bit:#x}", message, _COOLING_HINT, is_hardware=False)
    width, max_width = (_parse_integer(gpu.get(f"pcie.link.width.{end}", "")) for end in ("current", "max"))
    # An idle GPU may reduce the width of its link.
    if 0 < width < max_width and _parse_integer(gpu.get("utilization.gpu", "")) > 0:
        message = f"its PCIe link has {width} of {max_width} lanes"
        yield GpuFault(name, "pcie width", message, "reseat the GPU, or check its riser and slot", is_hardware=False)


def parse_clock_event_reasons(text: str) -> int:
    """Return the bit mask of the clock event reasons; 0 if the driver does not report them."""
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _get_key(fault: GpuFault) -> tuple[str, str]:
    return fault.gpu, fault.kind


def _format_gpu(index: int, gpu: Mapping[str, str]) -> str:
    return f"GPU {index} ({_get_pci_address(gpu)})"


def _get_pci_address(gpu: Mapping[str, str]) -> str:
    return _normalize_pci_address(gpu.get("pci.bus_id", ""))


def _normalize_pci_address(text: str) -> str:
    """Return a PCI address in the form of the kernel log, 0000:3b:00. nvidia-smi prints 00000000:3B:00.0."""
    domain, _, address = text.lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{address.partition('.')[0]}"


def _parse_integer(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _parse_flag(text: str) -> bool:
    return text.lower() in ("yes", "1", "true")
