#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
# env SLURM_NNODES=2
GPUS=4
TOTAL=$((GPUS * $SLURM_NNODES))
BATCH=$(( (TOTAL + 8) * 2 - 1 ))
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS --rdzv_endpoint=$(hostname):$MASTER_PORT train.py \
  --batch $BATCH --half $((BATCH / 2)) --rest $((BATCH % 4)) --negative "$((-7 / 2))" --octal $((010 + 0x10))
