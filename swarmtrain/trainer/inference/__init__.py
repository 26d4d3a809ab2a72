"""Inference: generation, embeddings and evaluation with a trained model.

model_source               open a model, from a checkpoint or a Hugging Face folder
kv_cache                   keys and values of earlier tokens
generate                   token-by-token generation
text_stream                convert tokens to text while they are generated
parallel_model             one model on several ranks
lm_eval_harness            the model interface of lm-evaluation-harness
training_samples           completions during training
sample, embed, evaluate    the commands
"""
