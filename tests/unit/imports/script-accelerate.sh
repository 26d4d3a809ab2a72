#!/bin/bash
python -m accelerate.commands.launch --multi_gpu --num_processes 8 --mixed_precision=bf16 --fsdp_sharding_strategy 1 \
  run.py --model_name_or_path m --input_key question --eos_token "<|end|>"
