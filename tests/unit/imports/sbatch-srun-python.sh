#!/bin/bash
#SBATCH --nodes=2-6
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --constraint="a100&ib"
#SBATCH --array=0-3
#SBATCH --mail-type=END --mail-user=me@example.org
cd $SLURM_SUBMIT_DIR
conda activate train
for trial in 1 2; do
  srun python -u main.py --trial $trial --out $SCRATCH/out &
done
wait
srun python -m package.evaluate
