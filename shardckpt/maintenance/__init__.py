"""What the command line does to checkpoints, without the command."""
