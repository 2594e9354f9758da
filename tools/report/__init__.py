"""`draftmill report`: what a dataset has cost, what went wrong and what is missing from it."""
