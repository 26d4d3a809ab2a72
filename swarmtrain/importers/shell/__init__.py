"""Read shell scripts: which commands they start, with which words and variables. Nothing is run.

unresolved, syntax, scope    parts of a word that have no value at import; syntax tree; variables
word_reader, parser          text to syntax tree
arithmetic, expansion        values of words
declarations, evaluation     variables and commands in the order of execution
"""
