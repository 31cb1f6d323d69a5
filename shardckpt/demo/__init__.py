"""``shardckpt demo``: the main job on real text, from training with some ranks to going on with others."""
