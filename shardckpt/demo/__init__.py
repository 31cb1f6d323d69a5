"""A training job that survives kills and other numbers of ranks: the example to copy, and ``shardckpt demo``.

``train.py`` is the example: open it, and copy its function ``train`` into your own training script. Its comments say
why each call of shardckpt is where it is. ``model.py`` has its model, which you replace by yours. ``launch.py``
is not for copying: in your cluster, torchrun, Slurm or Kubernetes does its work for ``shardckpt demo``, which is to
start the ranks, to kill them, and to start others; it also compares their losses.
"""
