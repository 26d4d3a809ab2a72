"""Operations of the commands on a run: deploy, follow, scale and stop it, and explain its failures."""
