"""Subcommands of `moe-kernels`, one module each (see moe_kernels.cli)."""
