#!/bin/bash
# --set RUN_NAME=first
: "${LR:=3e-4}"
: ${STEPS:=100}
readonly SEED=7
typeset MODE=fast
export OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false
SCHEDULE=
torchrun --standalone --nproc_per_node=${GPUS:-2} train.py --lr $LR --steps "${STEPS}" --seed $SEED --mode ${MODE+$MODE} \
  --warmup ${WARMUP-10} --schedule "${SCHEDULE:-cosine}" "${SCHEDULE-none}" ${RESUME:+--resume "$RESUME"} ${MODE:+--flag on} --run ${RUN_NAME:-none}
