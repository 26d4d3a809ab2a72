"""Uses of a trained model: generation, embeddings, evaluation.

model_source       a model, from a checkpoint or a Hugging Face folder
kv_cache           keys and values of earlier tokens
generate           token-by-token generation
text_stream        text of tokens while they are generated
parallel_model     one model on several ranks
lm_eval_harness    the model interface of lm-evaluation-harness
training_samples   completions during training
sample, embed, evaluate    the commands
"""
