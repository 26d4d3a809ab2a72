"""Token files from text: `swarmtrain data prepare`, and what looks at the files that it wrote.

options     what is asked for
sources     files as records: lines, rows, whole texts, cut into shards by size
encoders    records to tokens: a tokenizer.json, or a token a byte
shards      one shard to files that appear whole
workers     processes that make shards
shapes      documents of records: texts, prompts with completions, conversations
chats       chat templates, and what in them is the assistant's
job         all of it: goes on where it was left, and puts the shards together
verify      are token files whole?
look        samples as the model will see them
command     python -m swarmtrain.trainer data
"""
