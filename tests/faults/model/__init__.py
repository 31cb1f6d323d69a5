"""The commit protocols as small models, and a search through all that can happen to them."""
