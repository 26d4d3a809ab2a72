"""GPUs and other generic resources of the swarm: what nodes declare, which runs have claimed it, and which runs wait for it."""
