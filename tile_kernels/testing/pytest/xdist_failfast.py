"""Accepted: `pytest -x` stops all workers of pytest-xdist."""
