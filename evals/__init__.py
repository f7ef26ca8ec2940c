"""Paired accuracy evaluation of two servers, over HTTP only."""
