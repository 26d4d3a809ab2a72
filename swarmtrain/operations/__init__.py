"""What a command does with a run: deploy, scale and stop it, and explain its failures."""
