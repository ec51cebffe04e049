"""Shell scripts, read and never run: the arguments that each command would receive.

Assignments, arrays, quotes, line continuations, ``${X:-default}`` and integer arithmetic are
evaluated, and ``if`` where its test can be decided. What only a running shell knows (positional
parameters, the environment, command substitutions, loops) stays open: it is marked by name in the
words (``marks``).
"""
