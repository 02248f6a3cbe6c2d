"""Accepted: `tile-kernels precompile` compiles ahead of time; tests compile what they run."""
