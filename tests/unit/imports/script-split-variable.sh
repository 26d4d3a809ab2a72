#!/bin/bash
CMD="torchrun --nproc_per_node=1 train.py --name 'two words'"
nohup $CMD --last > out.log 2>&1 &
wait
