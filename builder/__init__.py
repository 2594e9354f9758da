"""What fills the disk: sources, the target-model client, the generate and extract stages."""
