"""What a trained model is used for: text, and what it makes of text that it has not seen.

source     a model, wherever it lies
cache      keys and values of tokens that have been seen
generate   tokens after tokens
text       tokens as text, as they come
shared     a model that several ranks share
harness    lm-evaluation-harness asks, a model answers
meanwhile  text while it is trained
sample, embed, evaluate   the verbs
"""
