"""What the scheduler decides, as values and pure functions: no engine, no clock. A snapshot of the queue in, its changes out."""
