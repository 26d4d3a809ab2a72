"""Convert a plan to the inputs of launchers: command lines (argv), environments, stack documents, sbatch scripts. Pure functions."""
