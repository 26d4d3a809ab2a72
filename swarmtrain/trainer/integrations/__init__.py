"""Integrations with other systems that start a training process."""
