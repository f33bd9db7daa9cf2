"""The frozen target: made or loaded, tapped, its embedding and head, its identity, batched generation."""
