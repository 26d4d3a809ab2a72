"""Storage of checkpoints: the disks and the files on them. What a checkpoint contains is decided by the modules above.

storage_backend     one disk that all nodes share, or one disk per node
commit              publish a staging folder as a checkpoint by rename; list and remove checkpoints
fence               only the newest world can commit checkpoints
discovery           find the newest complete checkpoint
tensor_storage      storage of tensor bytes for torch's distributed checkpoint (DCP)
completion_markers  files by which ranks show each other that their parts are written
node_groups         groups of ranks by node
node_local_writer   writer for nodes that each have their own disk
peer_transfer       copy files between the nodes' disks
sidecar_files       files next to checkpoints: metrics.jsonl and wandb-id
"""
