"""The transformer model and its losses."""
