"""The probe of a node, for `swarmtrain doctor`: checks its hardware, mounts, links and collectives."""
