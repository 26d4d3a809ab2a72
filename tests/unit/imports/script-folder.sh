#!/bin/bash
set -e
cd project || exit 1
(
  cd src && OMP_NUM_THREADS=1 NCCL_DEBUG=INFO torchrun --nproc_per_node=1 ../train.py --config conf/a.yml
)
