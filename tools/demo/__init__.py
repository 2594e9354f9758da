"""`draftmill demo`: the whole job on a small model, with the model and the prompts it needs."""
