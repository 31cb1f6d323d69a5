"""(npy, 2): one ``.npy`` file a shard, and JSON that names them and their dtypes; migrates (npy, 1)."""
