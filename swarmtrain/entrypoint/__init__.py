"""Programs that run inside the containers: the coordinator, the supervisor of each node, torch's elastic agent, and the ranks.

node_supervisor   python -m swarmtrain.entrypoint node         standard library only; outlives the agent, handles its failures
└─ forkserver     imports torch once                           all processes that need torch are forked from it
   └─ agent       one per round of the coordinator              torch's elastic agent
      └─ ranks                                                 run the user's script
coordinator       python -m swarmtrain.entrypoint rendezvous   hosts the c10d store and the coordinator, once per run
probe             python -m swarmtrain.entrypoint probe        runs the checks of `swarmtrain doctor` on a node

Modules at this level are used by more than one of these programs.
"""
