"""Models as Hugging Face keeps them: a folder of config.json and safetensors, written from a checkpoint and begun from."""
