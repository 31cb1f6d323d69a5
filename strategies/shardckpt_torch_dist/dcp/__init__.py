"""The storage reader and writer of plain ``torch.distributed.checkpoint``."""
