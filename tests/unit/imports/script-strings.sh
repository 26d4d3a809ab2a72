#!/bin/bash
CONFIG=configs/base.v2.yaml
MODEL=org/Model-7B
torchrun --nproc_per_node=1 train.py ${CONFIG%.*} ${CONFIG%%.*} ${CONFIG##*/} ${CONFIG#*/} ${MODEL/\//-} "${MODEL//o/0}" ${MODEL,,} ${MODEL:4} ${MODEL:0:3} ${#MODEL}
