raise ModuleNotFoundError("tests/engine runs without megatron", name="megatron")
