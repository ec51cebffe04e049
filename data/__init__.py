"""The data that ships with memcalc: the model catalog and the schema of its JSON output."""
