"""Following a run on a swarm: its states and its output, as one stream of updates."""
