"""Table of known failure modes: detection pattern, meaning, and fix of each.

The first matching entry is used, so specific entries come before general ones. Tests inject each failure mode.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RESUME_TEXT = "the run resumes from its newest checkpoint"


@dataclass(frozen=True)
class FailureEvidence:
    """Evidence about one failure: the data of the coordinator's failure event, and the related output."""

    data: Mapping[str, Any]
    output: str = ""
    """The last output lines of the failed rank, and the reason that the launcher reports for the state of the node's task."""

    @property
    def error(self) -> str:
        return str(self.data.get("error", ""))

    @property
    def searchable_text(self) -> str:
        """All text that may explain the failure. If there is a traceback, the output is omitted, since it may concern other problems."""
        trace = str(self.data.get("traceback", ""))
        return f"{self.error}\n{trace or self.output}"

    @property
    def signal(self) -> str:
        """Name of the signal that ended the process, such as SIGKILL; empty if there was none.

        It is also derived from a shell's exit code, 128 + signal number.
        """
        code = self.data.get("exit_code")
        signal_text = str(self.data.get("signal") or "")
        return signal_text or (get_signal_name(code - 128) if isinstance(code, int) and code > 128 else "")


@dataclass(frozen=True)
class FailureSignature:
    """Known failure mode. It matches if all its conditions are met: signal, OOM kill, and text pattern."""

    name: str
    meaning: str
    fix: str
    pattern: str = ""
    signal: str = ""
    out_of_memory: bool | None = None

    def matches_evidence(self, evidence: FailureEvidence, evidence_text: str) -> bool:
        """Return whether this failure mode matches `evidence` and its text `evidence_text`."""
        return (
            (not self.signal or self.signal == evidence.signal)
            and (self.out_of_memory is None or self.out_of_memory == bool(evidence.data.get("oom")))
            and (not self.pattern or re.search(self.pattern, evidence_text, re.IGNORECASE) is not None)
        )


def identify_failure(evidence: FailureEvidence) -> FailureSignature | None:
    """Return the first failure mode that matches `evidence`; None if none matches. The error is searched before all other output."""
    by_error = (signature for signature in FAILURE_SIGNATURES if signature.pattern and signature.matches_evidence(evidence, evidence.error))
    by_text = (signature for signature in FAILURE_SIGNATURES if signature.matches_evidence(evidence, evidence.searchable_text))
    return next(by_error, None) or next(by_text, None)


def get_signal_name(number: int) -> str:
    """Return the name of signal `number`, such as SIGKILL for 9; empty if it is not a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


FAILURE_SIGNATURES = (
    FailureSignature(
        "memory",
        "the process was OOM-killed: when a container reaches its memory limit, the kernel kills its largest process",
        "lower topology.micro_batch_size, or raise runner.docker_config.memory (/dev/shm counts toward it; null: no limit but the "
        "machine's memory)",
        out_of_memory=True,
    ),
    FailureSignature(
        "shared memory",
        "a data loader worker could not write a batch to /dev/shm, which was full",
        "raise runner.docker_config.shm_size, or use fewer data loader workers",
        pattern=r"out of shared memory|unable to (mmap|write|allocate).*shared memory|No space left on device.*/dev/shm",
    ),
    FailureSignature(
        "bus error",
        "the process accessed a missing page of a mapped file: /dev/shm was full, or a data file was truncated while it was mapped",
        "raise runner.docker_config.shm_size; check on the nodes that the data files are complete",
        signal="SIGBUS",
    ),
    FailureSignature(
        "segmentation fault",
        "native code accessed invalid memory: two libraries are incompatible, or one has a bug",
        "set PYTHONFAULTHANDLER: '1' in runner.env: the last lines of the log then show the failing call",
        signal="SIGSEGV",
    ),
    FailureSignature(
        "illegal instruction",
        "a library was built for a newer CPU than this node has",
        "compare lscpu on this node with the others; build the image for the oldest CPU",
        signal="SIGILL",
    ),
    FailureSignature(
        "collective timeout",
        "a collective did not finish in time: a rank did not join it, because it hung, was slow, or ran a different part of the script",
        "check the ranks that reported nothing; run swarmtrain doctor CONFIG to measure the links between all nodes",
        pattern=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send) operation",
    ),
    FailureSignature(
        "GPU memory",
        "the GPU ran out of memory",
        "lower topology.micro_batch_size: the global batch and the losses stay the same; run nvidia-smi on that node to see what else uses "
        "the GPU",
        pattern=r"CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    FailureSignature(
        "GPU architecture",
        "the image's torch was not built for this GPU architecture",
        "use swarmtrain image build --base with a base image that has a newer CUDA",
        pattern=r"no kernel image is available for execution on the device",
    ),
    FailureSignature(
        "GPU driver",
        "the node's driver is too old for the CUDA version of the image's torch",
        "update the driver on that node, or install a torch build for an older CUDA version in the image",
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
    ),
    FailureSignature(
        "no GPU",
        "the container sees no GPU",
        "run nvidia-smi on that node; make the nvidia runtime its engine's default; check runner.swarm.gpu, which sets how containers "
        "get GPUs",
        pattern=r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected",
    ),
    FailureSignature(
        "no CUDA",
        "the image has a CPU-only build of torch",
        "install a CUDA build of torch in the image, or let swarmtrain.trainer choose the script's device",
        pattern=r"Torch not compiled with CUDA enabled",
    ),
    FailureSignature(
        "GPU assertion",
        "a GPU kernel found an invalid value, usually an index out of range, such as a token ID outside the vocabulary",
        "compare transformer_architecture.vocab_size with the data; set CUDA_LAUNCH_BLOCKING: '1' in runner.env to see the failing line",
        pattern=r"device-side assert triggered",
    ),
    FailureSignature(
        "GPU fault",
        "the GPU or its driver failed",
        "check dmesg on that node for Xid messages, and nvidia-smi -q for memory errors; reboot the node, or remove it from runner.hosts",
        pattern=r"uncorrectable ECC error|unspecified launch failure|illegal memory access|GPU has fallen off the bus|CUDA error",
    ),
    FailureSignature(
        "NCCL",
        "NCCL could not connect GPUs, or lost a connection between them",
        "set NCCL_DEBUG: INFO in runner.env to see which; run swarmtrain doctor CONFIG to measure all links and see which interface is "
        "chosen",
        pattern=r"NCCL error|nccl(System|Internal|Remote|UnhandledCuda)Error",
    ),
    FailureSignature(
        "no space",
        "a disk is full",
        "run df -h on that node; lower trainer.keep_checkpoints to keep fewer checkpoints",
        pattern=r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
    ),
    FailureSignature(
        "file too large",
        "a file exceeded the size limit of the system or of its file system",
        "check ulimit -f on that node, and the type of the file system of save_dir",
        pattern=r"File too large|\[Errno 27\]",
    ),
    FailureSignature(
        "read-only",
        "the process wrote to a read-only file system",
        "write to a folder that is mounted with runner.docker_config.docker_mounts",
        pattern=r"Read-only file system|\[Errno 30\]",
    ),
    FailureSignature(
        "open files",
        "the process reached its limit of open files and connections",
        "use fewer data loader workers, or raise the engine's limit: default-ulimits in /etc/docker/daemon.json",
        pattern=r"Too many open files|\[Errno 24\]",
    ),
    FailureSignature(
        "host memory",
        "a memory allocation failed",
        "lower topology.micro_batch_size or the number of data loader workers, or raise runner.docker_config.memory",
        pattern=r"MemoryError|Cannot allocate memory|can't allocate memory|\[Errno 12\]|can't start new thread|std::bad_alloc",
    ),
    FailureSignature(
        "port in use",
        "the port is already in use",
        "set runner.master_port to another port (the next one is used too); use a different port per rank for a port that the script opens",
        pattern=r"Address already in use|EADDRINUSE|port is in use|\[Errno 98\]",
    ),
    FailureSignature(
        "name not found",
        "a host name could not be resolved",
        "use node0, node1 … as host names inside a run; if the nodes have no internet access, remove downloads from the script",
        pattern=r"Temporary failure in name resolution|Name or service not known|\[Errno -[23]\]|No address associated with hostname",
    ),
    FailureSignature(
        "native library",
        "a library that a Python module needs is missing from the image, or has an incompatible version",
        "install it in the image: write a Dockerfile FROM the image that runs apt-get install",
        pattern=r"ImportError: .*(cannot open shared object file|undefined symbol|GLIBC|file too short|invalid ELF header)",
    ),
    FailureSignature(
        "import",
        "the script imports a module or a name that does not exist",
        "install packages in the image; add your own files to runner.code",
        pattern=r"ModuleNotFoundError|ImportError",
    ),
    FailureSignature(
        "syntax",
        "the script is not valid Python",
        "run python -m py_compile SCRIPT to see the line",
        pattern=r"(SyntaxError|IndentationError|TabError):",
    ),
    FailureSignature(
        "permission",
        "permission denied for a file: the container's user is not its owner",
        "make the folders of runner.docker_config.docker_mounts writable for this user: run ls -ln and chown on the node",
        pattern=r"PermissionError|Permission denied|\[Errno 13\]",
    ),
    FailureSignature(
        "missing file",
        "a file does not exist inside the container",
        "mount its folder on every node with runner.docker_config.docker_mounts; use paths as they are inside the container",
        pattern=r"FileNotFoundError|No such file or directory|\[Errno 2\]",
    ),
    FailureSignature(
        "image",
        "the node could not pull the image",
        "run docker pull IMAGE on that node to see why; add a registry without TLS to its engine's insecure-registries; if the registry "
        "requires a login, run docker login, and deploy with swarmtrain deploy or docker stack deploy --with-registry-auth",
        pattern=r"No such image|pull access denied|manifest unknown",
    ),
    FailureSignature(
        "no node",
        "no node can run the container: each is down, drained, or lacks the reserved resources",
        "run docker node ls; run swarmtrain doctor CONFIG to see what is missing on which node",
        pattern=r"no suitable node|insufficient resources",
    ),
    FailureSignature(
        "mount",
        "a folder to be mounted does not exist on the node",
        "create it on every node, or mount a shared file system there",
        pattern=r"bind source path does not exist|source path not found",
    ),
    FailureSignature(
        "aborted",
        "native code aborted: its last output is above",
        "set TORCH_SHOW_CPP_STACKTRACES: '1' in runner.env to see where; run swarmtrain logs --rank R to see all output of that rank",
        signal="SIGABRT",
    ),
    FailureSignature(
        "killed",
        "the process was killed from outside: the kernel counted no OOM kill in its container",
        "check dmesg on that node to see whether the machine itself ran out of memory, and docker events for other causes",
        signal="SIGKILL",
    ),
    FailureSignature(
        "container killed",
        "the whole container was killed: by the kernel if the machine ran out of memory, by the engine, or manually",
        "check dmesg and journalctl -u docker on that node, at that time",
        pattern=r"non-zero exit \(137\)|container was killed|ended without reporting a reason",
    ),
    FailureSignature(
        "node lost",
        "the machine or its engine is down, or the network to it is unavailable",
        "run docker node ls; " + _RESUME_TEXT + " when the node is back, or on other nodes",
        pattern=r"was lost|stopped sending heartbeats|fell silent|ended together with its machine",
    ),
    FailureSignature(
        "unresponsive",
        "the process hung or was stopped, or its machine is much slower than the others",
        "run swarmtrain logs on that node to see its last output; run swarmtrain doctor CONFIG to measure the links between all nodes",
        pattern=r"did not respond: all other ranks waited",
    ),
    FailureSignature(
        "peer lost",
        "another rank died first, without reporting the reason",
        "check the logs of the other ranks; run docker node ls to see whether a machine was lost",
        pattern=r"connection (was )?(closed|reset|refused)|closed its connections without|Broken pipe|DistNetworkError|DistStoreError"
        r"|RendezvousConnectionError",
    ),
)
