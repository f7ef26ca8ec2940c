"""HTTP surface of the service."""
