"""Checks: what others printed or measured, held against the engine."""
