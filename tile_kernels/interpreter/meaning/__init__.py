"""The semantics of every construct of the language, one module for each group."""
