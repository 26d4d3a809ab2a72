"""`python -m swarmtrain` is `swarmtrain`."""

from swarmtrain.cli import main

main()
