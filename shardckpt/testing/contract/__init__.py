"""The contracts of a strategy, part by part, and of a store."""
