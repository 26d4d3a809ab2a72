#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-task=8
# env SLURM_NNODES=4
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
overrides=""
if [ $# -ne 0 ]; then
  overrides="$*"
fi
LOGLEVEL=INFO \
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_id $RANDOM --rdzv_endpoint "$head_node_ip:29500" ./train.py --x $overrides
