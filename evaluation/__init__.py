"""Live decoding with chain and tree, replay over shards, the one definition of acceptance length, reports."""
