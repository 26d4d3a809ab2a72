#!/bin/bash
HOSTS="--hostfile /job/hosts"
python -m deepspeed.launcher.runner $HOSTS --num_gpus 8 --master_port=29600 finetune.py --deepspeed --deepspeed_config ds.json \
  --local true 2>&1 | tee run.log
