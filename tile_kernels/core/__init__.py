"""What an op file may import. Nothing here depends on a particular op."""
