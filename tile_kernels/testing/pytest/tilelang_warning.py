"""Accepted: TileLang's warnings reach pytest as they are."""
