"""Names of files, for modules that import torch and for the one that does not."""

#: The common state, where it is not an object among others.
COMMON_FILE = "common.pt"
#: Our own index.
INDEX_FILE = "shardckpt-index.safetensors"
