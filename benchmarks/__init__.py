"""Measurements against peers in the same run. Not installed."""
