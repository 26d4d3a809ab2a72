"""Training loops that take their steps when they are told to: ours, and those that it is measured against.

Each is a program, `python -m benchmarks.loops.NAME CONFIG`, in a process of its own. CONFIG is ours, as JSON.
"""
