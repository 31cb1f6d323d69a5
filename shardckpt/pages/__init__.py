"""Pictures of checkpoints: HTML pages that stand in one file, work offline and ask no server."""
