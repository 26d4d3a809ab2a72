"""The GPUs that Swarm gave this container out of those that its engine declares.

Swarm tells them by environment, DOCKER_RESOURCE_ and the kind, and shows them to nobody: that is left to NVIDIA's toolkit,
which does it only where its `swarm-resource` says so, and in some versions not even then. CUDA's own variable keeps the
ranks to them wherever the container sees more.
"""

from __future__ import annotations

from collections.abc import Mapping

_ASSIGNED = "DOCKER_RESOURCE_"


def assigned(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that Swarm gave us; none if it gave a mere number of them, or was not asked."""
    found = [gpu for name, value in sorted(environ.items()) if name.startswith(_ASSIGNED) for gpu in value.split(",")]
    return tuple(gpu for gpu in found if gpu and not gpu.isdigit())


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps the ranks to these GPUs, less what `environ` says already; local rank 0 has the first of them."""
    ids = assigned(environ)
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids and "CUDA_VISIBLE_DEVICES" not in environ else {}
