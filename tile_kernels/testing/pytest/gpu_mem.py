"""Accepted without effect: workers use one GPU through PyTorch's allocator, and no limit is needed."""
