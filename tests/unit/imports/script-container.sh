#!/bin/bash
#SBATCH -N 1 --gpus-per-node=2
WORK=/p/work
srun --export=ALL,LOGLEVEL=info apptainer exec --nv --env HF_HOME=/p/hf --env TORCH_HOME=/p/torch --env A=1,B=2 \
  --bind "$WORK:/work" -B /p/data:/data:ro image.sif \
  bash -c "cd /tmp && torchrun --nproc_per_node=2 /opt/code/train.py --data /data --name 'with space' --cost \"\$((3 * 4))\""
