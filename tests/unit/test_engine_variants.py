"""Warnings about engines that no test has: what they report about themselves, as documented by Docker."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.launchers.common.engine_variants import collect_findings

# SecurityOptions as in the reference of Docker's API, GET /info.
PLAIN = ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"OperatingSystem": "Docker Desktop", "SecurityOptions": PLAIN}, "Docker Desktop, on which runs are not tested"),
        ({"OperatingSystem": "Debian GNU/Linux 13 (trixie)", "SecurityOptions": [*PLAIN, "name=rootless"]}, "is rootless"),
        ({"OperatingSystem": "Rocky Linux 9.4", "SecurityOptions": ["name=seccomp,profile=builtin", "name=selinux"]}, "SELinux"),
    ],
)
def test_an_engine_of_an_untested_kind_is_a_warning(info: dict[str, Any], message: str) -> None:
    (finding,) = collect_findings(info, "the engine", uses_overlay=True, uses_mounts=True)
    assert (message in finding.message, finding.fatal, bool(finding.hint)) == (True, False, True)


@pytest.mark.parametrize("options", [PLAIN, None, [*PLAIN, "name=rootless", "name=selinux"]])
def test_an_engine_is_no_warning_where_its_kind_does_not_matter(options: list[str] | None) -> None:
    info = {"OperatingSystem": "Debian GNU/Linux 13 (trixie)", "SecurityOptions": options}
    assert collect_findings(info, "the engine", uses_overlay=False, uses_mounts=False) == []
