#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
# env SLURM_NNODES=2
python -m venv env
source env/bin/activate
pip install deepspeed torchrun
python -c "import torch; print(torch.__version__)"
python setup.py develop
python download_data.py --to /data
echo torchrun never.py
which deepspeed python
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 train.py --deepspeed ds.json --launcher torchrun
