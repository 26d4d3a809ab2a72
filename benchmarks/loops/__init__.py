"""Training loops that run steps on request: swarmtrain's loop, and the baselines.

Each loop runs in a separate process: `python -m benchmarks.loops.NAME CONFIG`. CONFIG is a swarmtrain config as JSON.
"""
