"""The supervisor of a node: it starts torch's elastic agent, reports to the coordinator, and decides what happens after a failure."""
