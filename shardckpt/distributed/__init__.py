"""Ranks: collectives, process groups, and one error for all of them."""
