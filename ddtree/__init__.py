"""The draft tree: exact build, walk, rank and replay, verification and commit on any target."""
