"""``torch.save`` archives and pickles: written, and read by an allow-list."""
