"""The queue of a swarm that several people share: runs wait without containers until the scheduler admits them.

A queued run is an ordinary stack whose services have no replicas; its entry in the queue is in the labels of its coordinator's service. So
the state of the queue is in the swarm alone, and the commands for runs work on a queued run, too.

queue_state            reads the machines, the runs and their entries from the swarm
decisions/             decide, as pure functions, which runs start, shrink, grow and stop
scheduler              makes these changes; `__main__` is the program of its container, queue_service the service
resource_allocation    what a node of a run needs on a machine
request_checks         what `deploy` and `doctor` check before a run is queued

The launcher does not import this package: it only writes entries (`launchers.swarm.queue`).
"""
