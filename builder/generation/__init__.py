"""The generate stage: every pending prompt to the servers, every answer into the dataset."""
