"""The resources of the machines of a swarm, as the engine declares them or as a probe has found them."""
