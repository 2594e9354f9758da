"""Experiments on what draftmill promises: one command each, which goes on where it was stopped."""
