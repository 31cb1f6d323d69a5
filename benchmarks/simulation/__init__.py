"""Simulations: one file a library."""
