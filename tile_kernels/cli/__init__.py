"""The command `tile-kernels`: one module per subcommand, each with `add_arguments(parser)` and `run(args) -> int`."""
