"""Saves behind the training: staging, the thread or process that writes, and the queue that finalizes."""
