"""Memory: buffers, number formats and single accesses."""
