"""Accepted: workers share a GPU through the allocator of PyTorch; nothing needs to be limited."""
