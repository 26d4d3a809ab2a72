"""Other systems that start a training process."""
