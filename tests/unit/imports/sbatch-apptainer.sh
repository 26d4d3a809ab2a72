#!/usr/bin/env bash
#SBATCH -N 2
#SBATCH -n 2 -G 16
#SBATCH -J fm -t 0-12:00:00 -o out.txt
export NCCL_IB_DISABLE=1
LAUNCHER="python -m torch.distributed.run --nproc_per_node 8 --nnodes \$SLURM_NNODES \
  --node_rank \$SLURM_PROCID --master_addr $(hostname) --master_port 6000"
ARGS=(
  --config configs/base.yml
  --steps 1000
)
srun --mpi=none singularity exec --nv --cleanenv \
  -B /p/scratch/fm:/scratch,/p/data:/data:ro --bind $HOME/cache:/cache --env HF_HUB_OFFLINE=1,TOKEN_X=2 --home /p/home \
  docker://nvcr.io/nvidia/pytorch:24.10-py3 bash -c "$LAUNCHER scripts/train.py ${ARGS[*]}"
