"""What runs inside the containers: the node's supervisor, torch's agent under it, and the notice board's server.

supervisor   python -m swarmtrain.entrypoint node         standard library only; outlives the agent, decides what happens next
└─ server    imports torch, once                          whatever needs it is forked from here
   └─ agent  one a rendezvous round                       torch's own elastic agent, told what a swarm needs
      └─ server ── ranks                                  run the user's script
rendezvous   python -m swarmtrain.entrypoint rendezvous   the c10d store and the notice board, once a run
"""
