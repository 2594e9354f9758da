"""Prompt sources: files of several forms become prompts, one at a time."""
