"""From a dataset to batches: which samples, in which order, read ahead and merged on the device."""
