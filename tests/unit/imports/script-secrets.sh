#!/bin/bash
MY_TOKEN=not-a-real-token
wandb login 0123456789abcdef0123456789abcdef01234567
huggingface-cli login --token hf_notarealtoken
export WANDB_API_KEY=alsonotareal
export SERVICE=sk-notarealkey123
torchrun --nproc_per_node=1 train.py --hf-token hf_notarealtoken --wandb_api_key=alsonotareal --input_key text --sort-key "length" \
  --auth $MY_TOKEN --use_auth_token true --url https://example.org --last 1
