"""Checks: published and measured numbers compared with memcalc's own."""
