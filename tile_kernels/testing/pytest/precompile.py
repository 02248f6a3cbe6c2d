"""Accepted without effect: `tile-kernels precompile` compiles ahead of time; tests compile the kernels they run."""
