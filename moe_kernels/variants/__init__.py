"""Kernel variants; each module is imported only when its variant is asked for."""
