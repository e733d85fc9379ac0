"""Models: where they come from, how they are read, and the forward pass."""
