"""Inference: generation, embeddings and evaluation with a trained model.

model_source               open a model, from a checkpoint or a Hugging Face folder
generation                 token-by-token generation, with a KV cache
text_stream                convert tokens to text while they are generated
parallel_model             tensor-parallel model on several ranks
lm_eval_harness            model interface for lm-evaluation-harness
periodic_sampling          completions of prompts during training
sample_command, embeddings, evaluation    the commands
"""
