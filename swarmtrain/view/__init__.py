"""Output for users: progress, status and logs of a run. Data goes to stdout, messages go to stderr."""
