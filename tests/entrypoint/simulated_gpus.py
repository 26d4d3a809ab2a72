"""Simulated GPUs of a machine: an nvidia-smi that prints what files say, and a kernel log."""

from __future__ import annotations

from pathlib import Path

FIELDS = {
    "utilization.gpu": "97",
    "memory.used": "60000",
    "memory.total": "81559",
    "temperature.gpu": "61",
    "power.draw": "642.31",
    "clocks_event_reasons.active": "0x0000000000000004",
    "uuid": "GPU-{number}",
    "pci.bus_id": "00000000:{number}B:00.0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "[N/A]",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}
_SCRIPT = """#!/bin/sh
[ -e {folder}/error ] && while IFS= read -r line; do echo "$line"; done < {folder}/error && exit 15
case "$1" in
-L) file={folder}/listing ;;
--query-remapped-rows*) file={folder}/remapped ;;
*) file={folder}/gpus ;;
esac
while IFS= read -r line; do echo "$line"; done < $file
"""


class SimulatedGpus:
    """The GPUs of one machine, `count` of them, in the folder `folder`. `environment`: variables with which a process sees them."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.count = folder, count
        self.values: dict[int, dict[str, str]] = {number: {} for number in range(count)}
        (folder / "nvidia-smi").write_text(_SCRIPT.format(folder=folder))
        (folder / "nvidia-smi").chmod(0o755)
        (folder / "kern.log").touch()
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "SWARMTRAIN_KERNEL_LOG": str(self.folder / "kern.log")}

    def write(self, remap_failure: str = "No", remap_pending: str = "No") -> None:
        """Write what nvidia-smi prints. The state of remapped rows is that of GPU 1; GPU 0 is healthy."""
        rows = [
            ", ".join(values.get(name, default).format(number=number) for name, default in FIELDS.items())
            for number, values in self.values.items()
        ]
        self._replace("gpus", rows)
        self._replace("listing", [f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number})" for number in self.values])
        states = {number: (remap_pending, remap_failure) if number == 1 else ("No", "No") for number in self.values}
        self._replace("remapped", [f"GPU-{number}, {pending}, {failure}" for number, (pending, failure) in states.items()])

    def set_value(self, field: str, value: str) -> None:
        """Set a field of GPU 1."""
        self.values[1][field] = value
        self.write()

    def remove_gpu(self) -> None:
        del self.values[1]
        self.write()

    def fail(self, message: str) -> None:
        """Let nvidia-smi fail with this message."""
        self._replace("error", [message])

    def log_xid(self, number: int, text: str, address: str = "0000:1b:00") -> None:
        with (self.folder / "kern.log").open("a") as log:
            log.write("Nov 26 01:00:00 gpu-1 kernel: [  1.5] usb 1-1: new device\n")
            log.write(f"Nov 26 01:00:01 gpu-1 kernel: [4711.5] NVRM: Xid (PCI:{address}): {number}, {text}\n")

    def _replace(self, name: str, lines: list[str]) -> None:
        (self.folder / f"{name}.new").write_text("".join(f"{line}\n" for line in lines))
        (self.folder / f"{name}.new").replace(self.folder / name)
