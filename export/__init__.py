"""Checkpoint in, servable folder out, verified by reloading it."""
