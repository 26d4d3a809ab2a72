"""Code that several launchers share: history, containers and their logs, the Docker engine, run folders."""
