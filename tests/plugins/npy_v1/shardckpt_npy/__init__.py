"""(npy, 1): one ``.npy`` file a shard, and JSON that names them."""
