"""What people see: progress, a run's status, and the stream of its output. stdout is data, stderr is talk."""
