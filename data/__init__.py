"""The data that ships with memcalc: the model catalogue and the schema of its JSON output."""
