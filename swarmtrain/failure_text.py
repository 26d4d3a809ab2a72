"""Failures of ranks in the user's words. torch's and gloo's text stays in the events, and `why` and `logs` show it as detail.

Pure, and standard library only: the coordinator uses it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swarmtrain.protocol import is_collateral_failure

_MAX_ERROR_LENGTH = 400
# What torch adds to the text of an error: the place in its source code, and its guess at the reason.
_SOURCE_LOCATION_PATTERN = re.compile(r"\[?(?:/[\w.+-]+)+\.(?:cc|cpp|cu|cuh|h|hpp):\d+\]?:?\s*")
_TORCH_ADVICE_PATTERN = re.compile(
    r"(?:^|(?<=[.!])) *(?:This may indicate a possible application crash|GLHF|Exception raised from|If you suspect this is|"
    r"For debugging consider|Device-side assertions were|Compile with `?TORCH_USE_CUDA_DSA).*",
    re.IGNORECASE | re.DOTALL,
)
_TIMEOUT_PATTERN = re.compile(r"time[d -]*out|watchdog caught", re.IGNORECASE)


def find_peer_node(error: str, node: str, address_by_node: Mapping[str, str]) -> str:
    """Return the only node other than `node` whose address is in the text `error`; empty if there is none, or more than one."""
    peers = {
        peer
        for peer, address in address_by_node.items()
        # The first test is for speed: with 1,000 nodes, re would compile each address for each failure.
        if address and address in error and re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.])", error) and peer != node
    }
    return peers.pop() if len(peers) == 1 else ""


def describe_error(failure: Mapping[str, Any]) -> str:
    """Return the reason of a failure, the data of a failure event, in the user's words and on one line."""
    if is_collateral_failure(failure):
        return _describe_collateral_failure(failure)
    error = " ".join(_TORCH_ADVICE_PATTERN.sub("", _SOURCE_LOCATION_PATTERN.sub("", str(failure.get("error") or ""))).split())
    if not error:
        return f"killed by {failure['signal']}" if failure.get("signal") else f"exit code {failure.get('exit_code')}"
    return error if len(error) <= _MAX_ERROR_LENGTH else f"{error[: _MAX_ERROR_LENGTH - 1]}…"


def format_failure(failure: Mapping[str, Any]) -> str:
    """Return the data of a failure event as text: `node1 rank 3 failed: REASON`."""
    rank_label = f"{failure.get('node')} rank {failure['rank']}" if failure.get("rank") is not None else f"{failure.get('node')}"
    return f"{rank_label} {'' if is_collateral_failure(failure) else 'failed: '}{describe_error(failure)}"


def is_timeout(failure: Mapping[str, Any]) -> bool:
    """Return whether a failure is collateral, and the rank waited too long for another rank."""
    return is_collateral_failure(failure) and _TIMEOUT_PATTERN.search(str(failure.get("error"))) is not None


def _describe_collateral_failure(failure: Mapping[str, Any]) -> str:
    peer = failure.get("peer") or "another rank"
    if "SIGTERM" in f"{failure.get('error') or ''} {failure.get('signal') or ''}":
        return "was terminated by SIGTERM"
    if is_timeout(failure):
        return f"waited too long for {peer}"
    return f"lost its connection to {peer}"
