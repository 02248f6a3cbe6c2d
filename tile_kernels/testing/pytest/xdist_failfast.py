"""Accepted without effect: `pytest -x` stops all workers of pytest-xdist."""
