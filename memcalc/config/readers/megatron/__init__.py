"""Megatron-LM's arguments, in a launch script or in a YAML file with ``MODEL_ARGS``.

The arguments' names and defaults are those of ``megatron/training/arguments.py``. A value that only
a running shell knows is never guessed: for the model it is an error, for parallelism and run it is
left out with a warning. Both name it.
"""
