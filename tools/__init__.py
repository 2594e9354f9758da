"""What an operator types and sees: commands, reports, demo and bench."""
