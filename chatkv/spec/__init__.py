"""Guessing ahead and checking all guesses in one forward pass. The text never depends on it."""
