"""Plugins: what they may offer, how they are found, and which strategy reads a checkpoint."""
