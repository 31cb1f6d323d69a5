"""``shardckpt demo``: the main job on real text, from training with 4 ranks to going on with 2 and with 1."""
