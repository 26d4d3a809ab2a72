"""Benchmarks of swarmtrain against comparable tools: `make bench`, or `make bench ONLY=help`.

A benchmark is a function that yields rows, and an entry in registry.py. It measures swarmtrain and the baseline in turns (A B A B …),
so that drift in the machine's speed affects both. To add a benchmark: write the function, register it, run it, and add it to
docs/reference/speed.md with `make bench DOCS=1`.
"""
