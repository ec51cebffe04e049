raise ModuleNotFoundError("tests/engine runs without transformers", name="transformers")
