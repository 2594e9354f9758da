"""The extract stage: hidden states of every generated sample, checked and stored."""
