"""The machine: programs, lanes, roles and the translation from TIR."""
