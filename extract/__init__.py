"""The target's forward over corpus shards, written as feature shards; what that will cost, planned first."""
