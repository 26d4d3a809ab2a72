"""Training loops that take steps on request: swarmtrain's, and those that it is measured against.

Each is a program, `python -m benchmarks.loops.NAME CONFIG`, in a process of its own. CONFIG is a swarmtrain config as JSON.
"""
