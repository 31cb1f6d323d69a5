from shardckpt.commit.owner import Owner as Owner
