"""DiLoCo: learners train independently for a round of steps, and combine their parameters after it.

A learner has its own parameters and optimizer state, and reads its own part of each global batch. It does not belong to a rank or a node:
one rank can train several learners one after another, and several ranks can train one learner together (see
TopologyConfig.assign_learners). So the result depends on the number of learners, and not on the number of ranks.

learner         the state of one learner on this rank
exchange        the mean pseudo-gradient of all learners, which are exchanged as bytes
optimizer       inner optimizers, outer optimizer and global parameters, and what is saved of them in checkpoints
step            one optimizer step of all learners

Sources: Douillard et al. 2023, DiLoCo (arXiv 2311.08105); 2025, Streaming DiLoCo (arXiv 2501.18512).
"""
