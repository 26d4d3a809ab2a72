"""The modules of the table, in the order in which they run: what is most likely to fail comes first."""

STAGES = {
    "facts": "versions, memory bandwidth and matrix products",
    "launched_run": "deploy, stop and resume a run with the commands of swarmtrain",
    "equivalence": "losses and gradient norms, compared with float32 on the CPU",
    "determinism": "repeated and resumed runs, compared bit by bit",
    "mask_costs": "time and memory of attention masks",
    "throughput": "tokens per second, compared with a loop of torch alone",
    "step_costs": "host synchronizations, kernels and idle time in a step",
    "checkpoint_costs": "seconds to draw, save and load a model",
    "memory_accuracy": "estimated and measured memory",
    "multiple_ranks": "several ranks, compared with one; out of memory",
}
"""Descriptions by name."""
