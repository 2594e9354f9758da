"""`draftmill estimate`: what a job takes, and how that is said."""
