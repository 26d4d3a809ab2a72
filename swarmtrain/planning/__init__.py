"""Plan a run: from a config, its shipped files and an inventory of machines to hosts, slots and the reasons for this choice. Pure."""
