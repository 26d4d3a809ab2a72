#!/usr/bin/env bash
set -euo pipefail
usage() {
  echo "usage: $0"
}
train() {
  local lr=$1
  local -a extra=("${@:2}")
  if [ -f checkpoint.pt ]; then
    torchrun --nproc_per_node=2 train.py --lr "$lr" "${extra[@]}"
  else
    torchrun --nproc_per_node=2 train.py --lr "$lr" "${extra[@]}"
  fi
}
main() {
  mkdir -p logs
  train 0.1 --name "a b" ${NAME:-x}
}
main "$@"
