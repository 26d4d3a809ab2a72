"""Export of checkpoints to Hugging Face's formats: `swarmtrain export`."""
