"""Formulas of what modules save for backward, derived by running them on symbols."""
