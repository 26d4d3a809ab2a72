"""Distributed PyTorch training on Docker Swarm, SSH and Slurm, from one YAML file."""

__version__ = "0.1.0"
