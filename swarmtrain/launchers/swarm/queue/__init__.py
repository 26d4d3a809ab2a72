"""What the launcher knows of a queue: the entry of a run, how a deploy submits it, and the policy. `swarmtrain.queueing` is the scheduler.

queue_entry         a run's entry, in the labels of its coordinator's service
submission          how a deploy creates, changes and stops a run in the queue
machine_settings    the part of a node's service that depends on its machine
policy_store        the policy, as a config object of the swarm
"""
