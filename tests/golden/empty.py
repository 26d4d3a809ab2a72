"""Nothing: a script for stack files that nobody deploys."""
