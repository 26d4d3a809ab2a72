"""Training data: token files, samples and the order of samples."""
