"""Draft models: their shape, vocabulary, forms on disk, and the door to speculators."""
