"""Linear attention in plain PyTorch: sequential recurrences in float32."""
