"""Health of a training process: hangs, stragglers, non-finite losses, diverged replicas, running out of memory."""
