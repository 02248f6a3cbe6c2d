"""Accepted without effect: TileLang's warnings reach pytest unchanged."""
