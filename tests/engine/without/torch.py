raise ModuleNotFoundError("tests/engine runs without torch", name="torch")
