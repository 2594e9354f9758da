"""`draftmill bench`: parts of draftmill measured beside their peers, in one run."""
