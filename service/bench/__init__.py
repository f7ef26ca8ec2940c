"""`service bench`: throughput and latency of a service, and of two variants or services side by side."""
