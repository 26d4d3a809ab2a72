"""Count the operations of a training step on fake tensors: no GPU is needed, and the counts are the same on every machine.

operation_counter    what one operation costs, and the sum over all operations
requests             the command line of the two programs that follow
swarmtrain_step      the operations of swarmtrain's trainer
torchtitan_step      the operations of torchtitan's Llama 3 model, sharded with torchtitan's function
"""
