"""The stages of the acceptance run: each module's function `run` yields the rows of one stage.

facts               versions, memory bandwidth and matrix products
launched_run        a run that is deployed, stopped, resumed and killed with the commands of swarmtrain
equivalence         losses and gradient norms of many configs, compared with float32 on the CPU
variants            the configs that equivalence compares
determinism         repeated and resumed runs, compared bit by bit
step_costs          host synchronizations, kernels and idle time in a step
throughput          tokens per second and model FLOPS utilization (MFU), compared with torch_loop
torch_loop          the same model in a training loop that uses only torch
memory_accuracy     estimated and measured memory
checkpoint_costs    seconds to draw, save and load a model
multiple_ranks      several ranks, compared with one; out of memory
mask_costs          time and memory of attention masks
"""
