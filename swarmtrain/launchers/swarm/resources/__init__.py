"""GPUs and other generic resources of the swarm: the amounts that nodes declare, and the runs that have claimed them or wait for them."""
