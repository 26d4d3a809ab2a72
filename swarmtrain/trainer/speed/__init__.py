"""Measure the speed of training on this machine.

session        a model, an optimizer and data, for a few training steps
bench          time of a step, for `python -m swarmtrain.trainer bench` and `swarmtrain doctor --step-times`
plain_loop     a step of a plain PyTorch loop, to compare with
machine_check  losses and speed on this machine's GPUs, for `swarmtrain doctor --train`
"""
