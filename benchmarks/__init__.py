"""How fast swarmtrain is, beside what else does the same: `make bench`, or `make bench ONLY=help`.

A benchmark is a function that yields rows, and an entry in registry.py. It measures ours and the other in turns (A B A B …),
so that a machine whose speed drifts does so for both. To add one: write the function, enter it, run it, and
`make bench DOCS=1` puts it into docs/reference/speed.md.
"""
