#!/bin/bash
# --set DATA_DIR=/data/two words
# --set 1=big
# --set 2=small
# --set STAMP=today
STAMP=$(date +%s)
OUT=/runs/$STAMP
torchrun --nproc_per_node=1 train.py --data "$DATA_DIR" --size $1 "${2}" --rest "$@" --count $# --out $OUT
