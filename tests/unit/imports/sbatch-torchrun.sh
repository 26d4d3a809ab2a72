#!/bin/bash
#SBATCH --job-name=llm-pretrain     # what squeue shows
#SBATCH --account=proj42
#SBATCH -p gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
##SBATCH --exclusive

set -euo pipefail
module purge
module load CUDA/12.1 NCCL
source ~/venvs/llm/bin/activate

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=8 NCCL_DEBUG=WARN
export NCCL_IB_TIMEOUT=22
export NCCL_SOCKET_IFNAME=ib0
export HF_HOME=$SCRATCH/hf
export WANDB_API_KEY=not-a-key
GPUS_PER_NODE=4
DATA=/data/tokens

echo "on $(hostname)"
srun --label --kill-on-bad-exit=1 torchrun \
    --nnodes=$SLURM_NNODES \
    --nproc_per_node "$GPUS_PER_NODE" \
    --rdzv-id=$SLURM_JOB_ID \
    --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT \
    --max-restarts 2 \
    train.py --data "${DATA}/train set" --name 'a run' \
    --lr 3e-4 > train.log 2>&1
