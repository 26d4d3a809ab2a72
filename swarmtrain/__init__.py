"""Distributed PyTorch training on a Docker Swarm, from one YAML file."""

__version__ = "0.1.0"
