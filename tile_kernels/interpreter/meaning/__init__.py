"""What every construct of the language means, one module for each group."""
