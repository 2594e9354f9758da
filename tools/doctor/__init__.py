"""`draftmill doctor`: what stands in the way of a run."""
