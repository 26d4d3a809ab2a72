"""Token files, samples and their order."""
