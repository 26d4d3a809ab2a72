"""The queue of a swarm that several people share: runs wait without containers until the scheduler admits them.

A queued run is an ordinary stack whose services have no replicas; its entry in the queue is in the labels of its coordinator's service. So
the state of the queue is in the swarm alone, and the commands for runs work on a queued run, too. `queue_state` reads the swarm,
`decisions` decides, `scheduler` makes the changes; `submission` is what `deploy` does where a scheduler runs.
"""
