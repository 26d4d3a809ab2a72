#!/bin/bash
NAME="it's"
torchrun --standalone train.py "a b"'c d'e\ f $'tab\there' "dollar \$x" 'back`tick' "" '' --n="$NAME" \
  "new
line" a\\b "q\"q" x{1}y {} @file %h a=b=c -- '--' ~user^ ! --glob=*.txt "*" '[a-z]*' 2>&1 | tee -a "log file"
