"""`python -m swarmtrain.entrypoint ROLE`: the one command that every launcher puts into a container.

ROLE is node, rendezvous or probe; `together` is what a probe starts for itself. All else comes by environment.
"""

from __future__ import annotations

import sys

from swarmtrain.errors import EXIT_USAGE


def main(argv: list[str]) -> int:
    """Run the role that `argv` names and return its exit code."""
    match argv:
        case ["node"]:
            from swarmtrain.entrypoint.supervisor import main as node

            return node()
        case ["rendezvous"]:
            from swarmtrain.entrypoint.rendezvous import main as rendezvous

            return rendezvous()
        case ["probe"]:
            from swarmtrain.entrypoint.probe import main as probe

            return probe()
        case ["together"]:
            from swarmtrain.entrypoint.together import main as together

            return together()
        case _:
            sys.stderr.write("usage: python -m swarmtrain.entrypoint node | rendezvous | probe\n")
            return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
