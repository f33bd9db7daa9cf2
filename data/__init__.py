"""Conversations in, corpus shards with target-generated labels out; the formats and readers of both kinds of shard."""
