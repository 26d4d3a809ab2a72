"""Read shell scripts: which commands they start, with which words and variables. Nothing is run.

unresolved, syntax, scope                     parts of a word without a value at import; syntax tree; variables
word_reader, command_reader, parser           text to syntax tree
arithmetic, text_operators, expansion         values of words
assigned_names, declarations                  assignments
builtin_commands, evaluation                  commands in the order of execution
"""
