"""Token files, samples, and the order in which they come."""
