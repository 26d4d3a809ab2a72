"""Programs that run inside the containers: the coordinator, the supervisor of each node, torch's elastic agent, and the ranks.

node_supervisor   python -m swarmtrain.entrypoint node         standard library only; outlives the agent, decides what follows a failure
└─ forkserver     imports torch once                           whatever needs torch is forked from it
   └─ agent       one per rendezvous round                     torch's own elastic agent
      └─ ranks                                                 run the user's script
coordinator       python -m swarmtrain.entrypoint rendezvous   the c10d store and the run's decisions, once per run
probe             python -m swarmtrain.entrypoint probe        what `swarmtrain doctor` checks on a node

Modules at this level are used by more than one of these programs.
"""
