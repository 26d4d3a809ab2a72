#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# env SLURM_NTASKS=32
IMAGE=nvcr.io#nvidia/pytorch:24.10-py3
MOUNTS=/lustre/data:/data:ro,/lustre/out:/out
srun -l --container-image="$IMAGE" --container-mounts="${MOUNTS}" --container-workdir=/out --container-env=NCCL_DEBUG \
  --no-container-mount-home python -u /data/pretrain.py --out /out --tasks $SLURM_NTASKS
