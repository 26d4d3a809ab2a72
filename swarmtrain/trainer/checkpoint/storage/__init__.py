"""Storage of checkpoints as files on disks. The modules in the parent package define the contents of a checkpoint.

storage_backend     storage on one disk that all nodes share, or on one disk per node
commit              publish a staging folder as a checkpoint by rename; list and remove checkpoints
fence               fencing: only the newest world can commit checkpoints
discovery           find the newest complete checkpoint
tensor_storage      write tensor bytes for torch's distributed checkpoint (DCP), to one shared disk or to one disk per node
tensor_reader       read and verify them in one pass
completion_markers  files that show other ranks that a rank has written its shard
node_groups         ranks grouped by node
peer_transfer       copy files between the nodes' disks
sidecar_files       files next to checkpoints: metrics.jsonl and wandb-id
"""
