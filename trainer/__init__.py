"""What reads the disk: loader, vocab mapping, draft model, training loop, acceptance arithmetic."""
