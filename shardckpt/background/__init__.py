"""Background saves: staging, the thread or process that writes, and the queue that finalizes."""
