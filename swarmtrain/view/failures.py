"""The known failure modes, as data: how each is recognized, what it means, and what to do about it.

The first that matches is used, so specific entries come before general ones. A test injects each of them.
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
    """What is known of one failure: the failure event's data from the coordinator, and the related output."""

    data: Mapping[str, Any]
    output: str = ""
    """The task's reason in Swarm's words, and the last lines of the rank."""

    @property
    def error(self) -> str:
        return str(self.data.get("error", ""))

    @property
    def searchable_text(self) -> str:
        """All text that may explain the failure. If there is a traceback, the output is left out: it belongs to something else."""
        trace = str(self.data.get("traceback", ""))
        return f"{self.error}\n{trace or self.output}"

    @property
    def signal(self) -> str:
        """The signal's name, such as SIGKILL; also if only the exit code of a shell shows it."""
        code = self.data.get("exit_code")
        signal_text = str(self.data.get("signal") or "")
        return signal_text or (get_signal_name(code - 128) if isinstance(code, int) and code > 128 else "")


@dataclass(frozen=True)
class FailureSignature:
    """A failure mode. It matches if all of its conditions hold: the signal, whether memory ran out, and the pattern."""

    name: str
    meaning: str
    fix: str
    pattern: str = ""
    signal: str = ""
    out_of_memory: bool | None = None

    def matches(self, evidence: FailureEvidence, text: str) -> bool:
        """Return whether this is the failure, judging from `evidence` and `text`."""
        return (
            (not self.signal or self.signal == evidence.signal)
            and (self.out_of_memory is None or self.out_of_memory == bool(evidence.data.get("oom")))
            and (not self.pattern or re.search(self.pattern, text, re.IGNORECASE) is not None)
        )


def identify_failure(evidence: FailureEvidence) -> FailureSignature | None:
    """Return the first failure mode that matches: the error itself takes precedence over the rest of the output."""
    by_error = (signature for signature in FAILURE_SIGNATURES if signature.pattern and signature.matches(evidence, evidence.error))
    by_text = (signature for signature in FAILURE_SIGNATURES if signature.matches(evidence, evidence.searchable_text))
    return next(by_error, None) or next(by_text, None)


def get_signal_name(number: int) -> str:
    """Return SIGKILL for 9; empty for a number that is not a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


FAILURE_SIGNATURES = (
    FailureSignature(
        "memory",
        "the kernel killed it, because there was no memory left for it: a container that reaches its limit loses its largest process",
        "lower topology.micro_batch_size, or raise runner.docker_config.memory (/dev/shm counts too); null is all that the machine has",
        out_of_memory=True,
    ),
    FailureSignature(
        "shared memory",
        "a loader's worker could not put a batch into /dev/shm, which was full",
        "raise runner.docker_config.shm_size, or have fewer workers",
        pattern=r"out of shared memory|unable to (mmap|write|allocate).*shared memory|No space left on device.*/dev/shm",
    ),
    FailureSignature(
        "bus error",
        "it touched a page of a mapped file that is not there: /dev/shm was full, or a data file was cut off while it was mapped",
        "raise runner.docker_config.shm_size; check on the nodes that the data files are complete",
        signal="SIGBUS",
    ),
    FailureSignature(
        "segmentation fault",
        "native code read or wrote where it may not: a library that does not fit to another, or a defect in one",
        "set PYTHONFAULTHANDLER: '1' in runner.env: then the last lines before it say in which call",
        signal="SIGSEGV",
    ),
    FailureSignature(
        "illegal instruction",
        "a library was built for a newer processor than this node has",
        "compare lscpu on this node with the others; build the image for the oldest of them",
        signal="SIGILL",
    ),
    FailureSignature(
        "collective timeout",
        "a collective was not finished in time: some rank did not take part, since it hung, was slow, or was elsewhere in the script",
        "look at the ranks that reported nothing; swarmtrain doctor CONFIG measures the links between all nodes",
        pattern=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send) operation",
    ),
    FailureSignature(
        "GPU memory",
        "the GPU has no memory left for it",
        "lower topology.micro_batch_size: the global batch and the losses stay the same; nvidia-smi on that node shows who else uses "
        "the GPU",
        pattern=r"CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    FailureSignature(
        "GPU architecture",
        "the image's torch was not built for this kind of GPU",
        "build the image with a torch for it: image build --base with a newer CUDA",
        pattern=r"no kernel image is available for execution on the device",
    ),
    FailureSignature(
        "GPU driver",
        "the node's driver is older than the CUDA of the image's torch",
        "update the driver on that node, or build the image with a torch for an older CUDA",
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
    ),
    FailureSignature(
        "no GPU",
        "the container sees no GPU",
        "nvidia-smi on that node; its engine needs the nvidia runtime as its default; runner.swarm.gpu says how a container gets GPUs",
        pattern=r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected",
    ),
    FailureSignature(
        "no CUDA",
        "the image has a torch for CPUs only",
        "build the image with a torch for CUDA, or leave the script's device to swarmtrain.trainer",
        pattern=r"Torch not compiled with CUDA enabled",
    ),
    FailureSignature(
        "GPU assertion",
        "a kernel on the GPU found a value that cannot be, mostly an index beyond the end: a token that the vocabulary does not have",
        "compare transformer_architecture.vocab_size with the data; CUDA_LAUNCH_BLOCKING: '1' in runner.env names the line",
        pattern=r"device-side assert triggered",
    ),
    FailureSignature(
        "GPU fault",
        "the GPU or its driver failed",
        "dmesg on that node shows Xid messages; nvidia-smi -q shows errors of its memory; restart it, or remove it from runner.hosts",
        pattern=r"uncorrectable ECC error|unspecified launch failure|illegal memory access|GPU has fallen off the bus|CUDA error",
    ),
    FailureSignature(
        "NCCL",
        "NCCL could not connect GPUs, or lost a connection between them",
        "NCCL_DEBUG: INFO in runner.env says which; swarmtrain doctor CONFIG measures all links, and says which interface was chosen",
        pattern=r"NCCL error|nccl(System|Internal|Remote|UnhandledCuda)Error",
    ),
    FailureSignature(
        "no space",
        "a disk is full",
        "df -h on that node; fewer checkpoints: trainer.keep_checkpoints",
        pattern=r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
    ),
    FailureSignature(
        "file too large",
        "a file grew beyond what may be: a limit of the system, or of its disk",
        "ulimit -f on that node, and the kind of disk that save_dir is on",
        pattern=r"File too large|\[Errno 27\]",
    ),
    FailureSignature(
        "read-only",
        "it wrote to a disk that can only be read",
        "write below a folder of runner.docker_config.docker_mounts",
        pattern=r"Read-only file system|\[Errno 30\]",
    ),
    FailureSignature(
        "open files",
        "it has more files and connections open than it may",
        "have fewer loader workers, or raise the limit: ulimits of the engine, default-ulimits in /etc/docker/daemon.json",
        pattern=r"Too many open files|\[Errno 24\]",
    ),
    FailureSignature(
        "host memory",
        "a request for memory was refused",
        "lower topology.micro_batch_size or the number of loader workers, or raise runner.docker_config.memory",
        pattern=r"MemoryError|Cannot allocate memory|can't allocate memory|\[Errno 12\]|can't start new thread|std::bad_alloc",
    ),
    FailureSignature(
        "port in use",
        "something listens on that port already",
        "choose another: runner.master_port, and the one after it; a port of the script's own must differ by rank",
        pattern=r"Address already in use|EADDRINUSE|port is in use|\[Errno 98\]",
    ),
    FailureSignature(
        "name not found",
        "a host name leads nowhere",
        "inside a run nodes are called node0, node1 …; without a way out, a script must not download",
        pattern=r"Temporary failure in name resolution|Name or service not known|\[Errno -[23]\]|No address associated with hostname",
    ),
    FailureSignature(
        "native library",
        "a library that a Python module needs is not in the image, or is another one",
        "install it in the image: a Dockerfile FROM the image with apt-get install",
        pattern=r"ImportError: .*(cannot open shared object file|undefined symbol|GLIBC|file too short|invalid ELF header)",
    ),
    FailureSignature(
        "import",
        "the script imports what is not there, or not there under that name",
        "a package must be in the image; a file of your own belongs into runner.code",
        pattern=r"ModuleNotFoundError|ImportError",
    ),
    FailureSignature(
        "syntax",
        "the script is not valid Python",
        "python -m py_compile SCRIPT shows the place",
        pattern=r"(SyntaxError|IndentationError|TabError):",
    ),
    FailureSignature(
        "permission",
        "it may not do that to that file: the container's user is not its owner",
        "runner.docker_config.docker_mounts must be folders that this user may write: ls -ln on the node, chown there",
        pattern=r"PermissionError|Permission denied|\[Errno 13\]",
    ),
    FailureSignature(
        "missing file",
        "a file is not there, seen from inside the container",
        "mount its folder on every node: runner.docker_config.docker_mounts; paths are those of the container",
        pattern=r"FileNotFoundError|No such file or directory|\[Errno 2\]",
    ),
    FailureSignature(
        "image",
        "the node could not get the image",
        "docker pull IMAGE on that node shows why; a registry without TLS must be in its engine's insecure-registries",
        pattern=r"No such image|pull access denied|manifest unknown",
    ),
    FailureSignature(
        "no node",
        "no node can take the container: each is down, drained, or lacks what is reserved",
        "docker node ls; swarmtrain doctor CONFIG says what is missing where",
        pattern=r"no suitable node|insufficient resources",
    ),
    FailureSignature(
        "mount",
        "a folder that is to be mounted is not on the node",
        "make it on every node, or mount a disk there that all nodes share",
        pattern=r"bind source path does not exist|source path not found",
    ),
    FailureSignature(
        "aborted",
        "native code gave up: its last words are above",
        "TORCH_SHOW_CPP_STACKTRACES: '1' in runner.env shows where; swarmtrain logs --rank R shows all of that rank",
        signal="SIGABRT",
    ),
    FailureSignature(
        "killed",
        "somebody killed it: the kernel has not counted it as out of memory in its container",
        "dmesg on that node shows whether the machine itself had no memory left; docker events shows who else",
        signal="SIGKILL",
    ),
    FailureSignature(
        "container killed",
        "the whole container was killed: by the kernel, if the machine had no memory left, by its engine, or by hand",
        "dmesg and journalctl -u docker on that node, at that time",
        pattern=r"non-zero exit \(137\)",
    ),
    FailureSignature(
        "node lost",
        "the machine, its engine, or the network to it is away",
        "docker node ls; " + _RESUME_TEXT + " when it is back, or on other nodes",
        pattern=r"was lost|fell silent",
    ),
    FailureSignature(
        "peer lost",
        "another rank died first, and never reported its reason",
        "see what the others did; docker node ls shows whether a machine was lost",
        pattern=r"connection (was )?(closed|reset|refused)|Broken pipe|DistNetworkError|DistStoreError|RendezvousConnectionError",
    ),
)
