#!/bin/bash
#SBATCH --gpus-per-node=2
time env -u DEBUG HF_HUB_OFFLINE=1 srun -N1 -n1 --cpu-bind=none --exclusive numactl --cpunodebind=0 -m 0 \
  timeout -k 5 3600 stdbuf -oL nohup /usr/bin/env X=1 torchrun --nproc_per_node=2 train.py --x 1
