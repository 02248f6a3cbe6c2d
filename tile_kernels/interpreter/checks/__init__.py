"""Checks that run together with a kernel."""
