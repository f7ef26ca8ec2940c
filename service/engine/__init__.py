"""Continuous batching over a paged KV cache: requests in, step events out."""
