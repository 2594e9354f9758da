"""Shards and the records in them: the form on disk, and reading single samples."""
