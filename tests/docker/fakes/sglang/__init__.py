"""Stands in for the sglang package inside a container, so that the compose files run as they are."""
