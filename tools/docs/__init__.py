"""Generate pages of the documentation: `python -m tools.docs`. Not part of the wheel."""
