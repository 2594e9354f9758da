"""Datasets of other tools: writing them from ours, and making ours of them."""
