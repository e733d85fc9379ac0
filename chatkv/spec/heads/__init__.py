"""Trained draft heads: small modules that guess the next tokens from the target's own states."""
