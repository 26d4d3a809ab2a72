"""The coordinator: hosts the c10d store of a run, and decides when a new world forms. Standard library only, except for the store."""
