#!/bin/bash
declare -a TORCHRUN_ARGS=(--nnodes 1
  --nproc_per_node=2)   # on each node
typeset -a ARGS=(--first)
ARGS+=(--name "two words" 'single $quoted' # comment
  --tag a#b)
ARGS+=(--list "${TORCHRUN_ARGS[1]}" --count ${#ARGS[@]})
EXTRA="--more"
EXTRA+=" options"
EMPTY=()
torchrun "${TORCHRUN_ARGS[@]}" train.py "${ARGS[@]}" $EXTRA "$EXTRA" "${EMPTY[@]}" ${ARGS[*]} "${ARGS[*]:0:2}" "#" x#y \#
