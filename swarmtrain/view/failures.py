"""The known ways to fail, as data: how each is recognised, what it means, and what to do about it.

The first that matches is taken, so the narrow ones stand before the wide ones. A test makes each of them happen.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CHECKPOINT = "the run goes on from its newest checkpoint"


@dataclass(frozen=True)
class Evidence:
    """What is known of one death: the failure's data as the board has it, and all that was said about it."""

    data: Mapping[str, Any]
    said: str = ""
    """The task's reason in Swarm's words, and the last lines of the rank."""

    @property
    def error(self) -> str:
        return str(self.data.get("error", ""))

    @property
    def text(self) -> str:
        """Return all that tells why. Where there is a traceback, what was printed before it tells of something else."""
        trace = str(self.data.get("traceback", ""))
        return f"{self.error}\n{trace or self.said}"

    @property
    def signal(self) -> str:
        """Return SIGKILL and the like; also of a process that a shell's exit code tells of."""
        code = self.data.get("exit_code")
        named = str(self.data.get("signal") or "")
        return named or (signal_name(code - 128) if isinstance(code, int) and code > 128 else "")


@dataclass(frozen=True)
class Known:
    """A way to fail. It matches when all that is given does: the signal, whether memory ran out, and the words."""

    name: str
    means: str
    fix: str
    words: str = ""
    signal: str = ""
    oom: bool | None = None

    def matches(self, evidence: Evidence, text: str) -> bool:
        """Say whether this is what happened, as far as `text` tells."""
        return (
            (not self.signal or self.signal == evidence.signal)
            and (self.oom is None or self.oom == bool(evidence.data.get("oom")))
            and (not self.words or re.search(self.words, text, re.IGNORECASE) is not None)
        )


def recognise(evidence: Evidence) -> Known | None:
    """Return the first way to fail that matches: the error's own words count for more than all that was said around it."""
    plain = (known for known in FAILURES if known.words and known.matches(evidence, evidence.error))
    wider = (known for known in FAILURES if known.matches(evidence, evidence.text))
    return next(plain, None) or next(wider, None)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; nothing for a number that is no signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


FAILURES = (
    Known(
        "memory",
        "the kernel killed it, because there was no memory left for it: a container that reaches its limit loses its largest process",
        "lower topology.micro_batch_size, or raise runner.docker_config.memory (/dev/shm counts too); null is all that the machine has",
        oom=True,
    ),
    Known(
        "shared memory",
        "a loader's worker could not put a batch into /dev/shm, which was full",
        "raise runner.docker_config.shm_size, or have fewer workers",
        words=r"out of shared memory|unable to (mmap|write|allocate).*shared memory|No space left on device.*/dev/shm",
    ),
    Known(
        "bus error",
        "it touched a page of a mapped file that is not there: /dev/shm was full, or a data file was cut off while it was mapped",
        "raise runner.docker_config.shm_size; see on the nodes whether the data files are whole",
        signal="SIGBUS",
    ),
    Known(
        "segmentation fault",
        "native code read or wrote where it may not: a library that does not fit to another, or a defect in one",
        "set PYTHONFAULTHANDLER: '1' in runner.env: then the last lines before it say in which call",
        signal="SIGSEGV",
    ),
    Known(
        "illegal instruction",
        "a library was built for a newer processor than this node has",
        "compare lscpu on this node with the others; build the image for the oldest of them",
        signal="SIGILL",
    ),
    Known(
        "collective timeout",
        "a collective was not finished in time: some rank did not take part, since it hung, was slow, or was elsewhere in the script",
        "the ranks that told nothing are the ones to look at; swarmtrain doctor CONFIG measures the links between all nodes",
        words=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send) operation",
    ),
    Known(
        "GPU memory",
        "the GPU has no memory left for it",
        "lower topology.micro_batch_size: the global batch and the losses stay; nvidia-smi on that node shows who else uses the GPU",
        words=r"CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Known(
        "GPU architecture",
        "the image's torch was not built for this kind of GPU",
        "build the image with a torch for it: image build --base with a newer CUDA",
        words=r"no kernel image is available for execution on the device",
    ),
    Known(
        "GPU driver",
        "the node's driver is older than the CUDA of the image's torch",
        "update the driver on that node, or build the image with a torch for an older CUDA",
        words=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
    ),
    Known(
        "no GPU",
        "the container sees no GPU",
        "nvidia-smi on that node; its engine needs the nvidia runtime as its default; runner.swarm.gpu says how a container gets GPUs",
        words=r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected",
    ),
    Known(
        "no CUDA",
        "the image has a torch for CPUs only",
        "build the image with a torch for CUDA, or leave the script's device to swarmtrain.trainer",
        words=r"Torch not compiled with CUDA enabled",
    ),
    Known(
        "GPU assertion",
        "a kernel on the GPU found a value that cannot be, mostly an index beyond the end: a token that the vocabulary does not have",
        "compare transformer_architecture.vocab_size with the data; CUDA_LAUNCH_BLOCKING: '1' in runner.env names the line",
        words=r"device-side assert triggered",
    ),
    Known(
        "GPU fault",
        "the GPU or its driver failed",
        "dmesg on that node shows Xid messages; nvidia-smi -q shows errors of its memory; restart it, or leave it out of runner.hosts",
        words=r"uncorrectable ECC error|unspecified launch failure|illegal memory access|GPU has fallen off the bus|CUDA error",
    ),
    Known(
        "NCCL",
        "NCCL could not connect GPUs, or lost a connection between them",
        "NCCL_DEBUG: INFO in runner.env says which; swarmtrain doctor CONFIG measures all links, and says which interface was chosen",
        words=r"NCCL error|nccl(System|Internal|Remote|UnhandledCuda)Error",
    ),
    Known(
        "no space",
        "a disk is full",
        "df -h on that node; fewer checkpoints: trainer.keep_checkpoints",
        words=r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
    ),
    Known(
        "file too large",
        "a file grew beyond what may be: a limit of the system, or of its disk",
        "ulimit -f on that node, and the kind of disk that save_dir is on",
        words=r"File too large|\[Errno 27\]",
    ),
    Known(
        "read-only",
        "it wrote to a disk that can only be read",
        "write below a folder of runner.docker_config.docker_mounts",
        words=r"Read-only file system|\[Errno 30\]",
    ),
    Known(
        "open files",
        "it has more files and connections open than it may",
        "have fewer loader workers, or raise the limit: ulimits of the engine, default-ulimits in /etc/docker/daemon.json",
        words=r"Too many open files|\[Errno 24\]",
    ),
    Known(
        "host memory",
        "a request for memory was refused",
        "lower topology.micro_batch_size or the number of loader workers, or raise runner.docker_config.memory",
        words=r"MemoryError|Cannot allocate memory|can't allocate memory|\[Errno 12\]|can't start new thread|std::bad_alloc",
    ),
    Known(
        "port in use",
        "something listens on that port already",
        "choose another: runner.master_port, and the one after it; a port of the script's own must differ by rank",
        words=r"Address already in use|EADDRINUSE|port is in use|\[Errno 98\]",
    ),
    Known(
        "name not found",
        "a host name leads nowhere",
        "inside a run nodes are called node0, node1 …; without a way out, a script must not download",
        words=r"Temporary failure in name resolution|Name or service not known|\[Errno -[23]\]|No address associated with hostname",
    ),
    Known(
        "native library",
        "a library that a Python module needs is not in the image, or is another one",
        "install it in the image: a Dockerfile FROM the image with apt-get install",
        words=r"ImportError: .*(cannot open shared object file|undefined symbol|GLIBC|file too short|invalid ELF header)",
    ),
    Known(
        "import",
        "the script imports what is not there, or not there under that name",
        "a package must be in the image; a file of your own belongs into runner.code",
        words=r"ModuleNotFoundError|ImportError",
    ),
    Known(
        "syntax",
        "the script is no Python",
        "python -m py_compile SCRIPT shows the place",
        words=r"(SyntaxError|IndentationError|TabError):",
    ),
    Known(
        "permission",
        "it may not do that to that file: the container's user is not its owner",
        "runner.docker_config.docker_mounts must be folders that this user may write: ls -ln on the node, chown there",
        words=r"PermissionError|Permission denied|\[Errno 13\]",
    ),
    Known(
        "missing file",
        "a file is not there, seen from inside the container",
        "mount its folder on every node: runner.docker_config.docker_mounts; paths are those of the container",
        words=r"FileNotFoundError|No such file or directory|\[Errno 2\]",
    ),
    Known(
        "image",
        "the node could not get the image",
        "docker pull IMAGE on that node shows why; a registry without TLS must be in its engine's insecure-registries",
        words=r"No such image|pull access denied|manifest unknown",
    ),
    Known(
        "no node",
        "no node can take the container: each is down, drained, or lacks what is reserved",
        "docker node ls; swarmtrain doctor CONFIG says what is missing where",
        words=r"no suitable node|insufficient resources",
    ),
    Known(
        "mount",
        "a folder that is to be mounted is not on the node",
        "make it on every node, or mount a disk there that all nodes share",
        words=r"bind source path does not exist|source path not found",
    ),
    Known(
        "aborted",
        "native code gave up: its last words are above",
        "TORCH_SHOW_CPP_STACKTRACES: '1' in runner.env shows where; swarmtrain logs --rank R shows all of that rank",
        signal="SIGABRT",
    ),
    Known(
        "killed",
        "somebody killed it: the kernel has not counted it as out of memory in its container",
        "dmesg on that node shows whether the machine itself had no memory left; docker events shows who else",
        signal="SIGKILL",
    ),
    Known(
        "container killed",
        "the whole container was killed: by the kernel, if the machine had no memory left, by its engine, or by hand",
        "dmesg and journalctl -u docker on that node, at that time",
        words=r"non-zero exit \(137\)",
    ),
    Known(
        "node lost",
        "the machine, its engine, or the network to it is away",
        "docker node ls; " + _CHECKPOINT + " when it is back, or on other nodes",
        words=r"was lost|fell silent",
    ),
    Known(
        "peer lost",
        "another rank went away first, and its own reason was never told",
        "see what the others did; docker node ls shows whether a machine was lost",
        words=r"connection (was )?(closed|reset|refused)|Broken pipe|DistNetworkError|DistStoreError|RendezvousConnectionError",
    ),
)
