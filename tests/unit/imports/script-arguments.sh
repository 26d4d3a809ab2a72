#!/bin/bash
BATCH=8
while [[ $# -gt 0 ]]; do
  case $1 in
    --batch) BATCH=$2; shift 2 ;;
    *) shift ;;
  esac
done
torchrun --nproc_per_node=1 train.py --batch $BATCH "$@" $* ${1:-default} "${2-}"
