"""Convert a plan to what launchers send: commands as argv lists, environments, stack documents, sbatch scripts. Pure functions."""
