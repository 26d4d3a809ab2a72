#!/bin/bash
#SBATCH --nodes=2-6
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --constraint="a100&ib"
#SBATCH --array=0-3
#SBATCH --mail-type=END --mail-user=me@example.org
cd $SLURM_SUBMIT_DIR
conda activate train
for name in train validation; do
  python prepare.py $name
done
srun python -u main.py --trial 1 --out /runs/trial &
wait
python -m package.evaluate
