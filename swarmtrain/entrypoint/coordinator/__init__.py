"""The coordinator: the c10d store of a run, and the decision when a new world forms. Standard library only, apart from the store."""
