"""Output for users: progress, a run's status, and the stream of its output. stdout is for data, stderr for messages."""
