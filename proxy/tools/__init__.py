"""What the commands beside ``serve`` are made of."""
