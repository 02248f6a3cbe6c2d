"""What an op file may import. Knows no op."""
