"""`python -m swarmtrain.entrypoint ROLE`: the command that every launcher runs in a container. ROLE is node, rendezvous or probe.

The probe also starts a process with the internal role `collective`. All settings come from environment variables.
"""

from __future__ import annotations

import sys

from swarmtrain.errors import EXIT_USAGE


def main(argv: list[str]) -> int:
    """Run the role that the command-line arguments `argv` name, and return its exit code."""
    match argv:
        case ["node"]:
            from swarmtrain.entrypoint.supervisor.node_supervisor import main as node_main

            return node_main()
        case ["rendezvous"]:
            from swarmtrain.entrypoint.coordinator.server import main as rendezvous_main

            return rendezvous_main()
        case ["probe"]:
            from swarmtrain.entrypoint.probe.node_probe import main as probe_main

            return probe_main()
        case ["collective"]:
            from swarmtrain.entrypoint.probe.collective_probe import main as collective_main

            return collective_main()
        case _:
            sys.stderr.write("usage: python -m swarmtrain.entrypoint node | rendezvous | probe\n")
            return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
