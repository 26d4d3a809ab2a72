"""Launchers: one package for each backend (Swarm, Slurm, SSH, …), selected by `runner_type` and imported on first use.

base        the interface of all launchers
registry    creates launchers, and finds runs among them
planner     makes plans
common      code that several launchers share
"""
