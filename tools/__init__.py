"""Tools of the checkout. Not part of the wheel."""
