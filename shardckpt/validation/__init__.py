"""What must hold across ranks before bytes move: sharding, replicas, keys, common state."""
