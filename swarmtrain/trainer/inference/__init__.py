"""Inference: generation, embeddings and evaluation with a trained model.

model_source               open a model, from a checkpoint or a Hugging Face folder
kv_cache                   KV cache: attention keys and values of earlier tokens
generation                 token-by-token generation
text_stream                convert tokens to text while they are generated
parallel_model             tensor-parallel model on several ranks
lm_eval_harness            model interface for lm-evaluation-harness
periodic_sampling          completions of prompts during training
sample_command, embeddings, evaluation    the commands
"""
