"""Hugging Face models: a folder of config.json and safetensors, exported from a checkpoint or used to initialize a model."""
