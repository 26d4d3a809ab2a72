#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=2
LAUNCHER="torchrun
  --nproc_per_node=1
  --rdzv_backend c10d"
OPTIONS="--epochs 2 --name 'one word'"
CMD="$LAUNCHER train.py $OPTIONS"
eval srun --label $CMD
