"""Tokenization: write token files from text with `swarmtrain data tokenize`, and inspect them.

tokenize_options      options of `data tokenize`
readers               read files as records (lines, rows or whole texts), and plan shards by size
tokenizer_backends    encode texts as tokens: with a tokenizer.json, or one token per byte
shards                build one shard and publish its files atomically
worker_pool           processes that build shards
document_builders     build documents from records: texts, prompts with completions, conversations
chat_template         apply chat templates, and find the assistant's tokens
pipeline              run a tokenization job: build missing shards, resume after an interruption, merge the shards
verification          verify that token files are complete and valid
sample_inspection     show samples as the model receives them
progress              progress bar on stderr
command               command line: python -m swarmtrain.trainer data
"""
