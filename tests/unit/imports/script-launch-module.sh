#!/bin/sh
GPUS=4
python3 -u -m torch.distributed.launch --use_env --nproc_per_node=$GPUS --nnodes=1 --node_rank=0 --master_port 29501 -m project.train --epochs 3
