"""Feature shards in, drafter checkpoints out: anchors, losses, the DeepSpeed loop, exact resume."""
