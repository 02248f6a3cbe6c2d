"""The execution engine: programs, lanes, roles and the translation from TIR."""
