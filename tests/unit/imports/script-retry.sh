#!/bin/bash
for attempt in 1 2 3; do
  echo "attempt $attempt"
  torchrun --nproc_per_node=1 train.py --resume latest && break
  sleep 1
done
