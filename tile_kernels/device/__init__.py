"""Device code that families share: macros for vectors, reductions, bits, codes and scale factors."""
