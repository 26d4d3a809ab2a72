"""Detection of hangs, dead peers, stragglers, non-finite losses, diverged replicas and out-of-memory errors in a training process."""
