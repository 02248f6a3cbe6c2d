"""Other libraries' models on our kernels. Each module imports its library only when it is used."""
