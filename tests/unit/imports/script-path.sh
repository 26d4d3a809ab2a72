#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=2
PREFIX=/opt/tools
module load cuda
export PATH=$PREFIX/bin:$PATH
export LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH
export PYTHONPATH="$PREFIX/src"
A=x
A=$A$A
A=$A$A
PATH=/opt/last:$PATH
srun torchrun --nproc_per_node 2 train.py --a $A
