"""Quantisers and dequantisers, one module per number format."""
