"""What is checked while a kernel runs."""
