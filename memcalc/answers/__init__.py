"""The questions: a function for each command, from a Config to a Report."""
