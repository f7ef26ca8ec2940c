"""Checkpoint formats, read into one canonical expert record."""
