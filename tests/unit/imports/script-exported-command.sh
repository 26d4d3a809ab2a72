#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
# env SLURM_NNODES=2
NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LAUNCHER="python -u -m torch.distributed.launch \
  --nproc_per_node 4 --nnodes $NNODES \
  --master_addr $MASTER_ADDR --master_port 6000 \
  "
export CMD=" \
  pretrain.py --lr 6e-5 --name 'a b' \
  "
srun --jobid 1 bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a main_log.txt
