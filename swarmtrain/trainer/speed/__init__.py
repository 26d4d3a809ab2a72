"""Measure the speed of training on this machine.

bench       speed of a config, for `python -m swarmtrain.trainer bench`
step_time   time of a step on one rank alone, for `swarmtrain doctor --step-times`
"""
