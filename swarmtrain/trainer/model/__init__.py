"""The transformer model and its loss functions."""
