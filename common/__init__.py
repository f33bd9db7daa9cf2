"""Foundations that know nothing of the project: ranks, logging, progress, atomic files, fingerprints, the command line."""
