"""Bytes on disk: checked files, staging directories and the one rename that publishes them."""
