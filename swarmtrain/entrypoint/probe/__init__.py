"""The probe of a node: its hardware, mounts, links and collectives, for `swarmtrain doctor`."""
