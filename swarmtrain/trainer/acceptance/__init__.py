"""Acceptance run: check that training is correct on this machine's GPUs, and measure how fast it is. `swarmtrain doctor --train`.

command    runs the stages, each in a process of its own, and prints their rows
stages     the table of stages, in the order in which they run
worker     a process that runs one stage, or a part of one
rows       a row of the result
session    a model, an optimizer and synthetic data for a few training steps
models     configs of the models that are measured
checks     the stages

Without a GPU, the same stages run on the CPU with tiny models, so that only the hardware is new on the first run on a GPU.
"""
