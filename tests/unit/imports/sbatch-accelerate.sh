#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
apptainer exec --nv /images/hf.sif accelerate launch --config_file fsdp.yml --num_machines $SLURM_NNODES --num_processes $RANKS \
  --machine_rank $SLURM_NODEID --main_process_ip $(scontrol show hostnames | head -n1) --main_process_port 29501 run_clm.py --model llama
