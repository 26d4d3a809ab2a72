"""Write token files from text: `swarmtrain data tokenize`, and the commands that inspect the result.

options               options of `data tokenize`
readers               files as records: lines, rows or whole texts, split into shards by size
tokenizer_backends    records to tokens: a tokenizer.json, or one token per byte
shards                one shard to files that are published atomically
worker_pool           processes that build shards
document_builders     documents from records: texts, prompts with completions, conversations
chat_template         chat templates, and which tokens are the assistant's
pipeline              the whole job: builds missing shards, resumes after an interruption, merges the shards
verify                whether token files are complete
inspect_samples       samples as the model will see them
progress              progress bar on stderr
command               python -m swarmtrain.trainer data
"""
