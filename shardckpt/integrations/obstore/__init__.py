"""Checkpoints on S3, Google Cloud Storage and Azure by obstore: streamed writes and conditional creates."""
