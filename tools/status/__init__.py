"""`draftmill status` and `sql`: what a dataset holds, once or live."""
