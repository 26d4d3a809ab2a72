"""What several launchers share: locks, history, containers, log files."""
