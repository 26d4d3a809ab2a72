"""Hugging Face models (config.json and safetensors files): export from a checkpoint, and import to initialize a model."""
