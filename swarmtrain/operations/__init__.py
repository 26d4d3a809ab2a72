"""Operations on runs that the commands call: deploy, follow, scale and stop a run, and explain its failures."""
