"""Hidden states to the bytes of a payload and back: planes, rotation, frames, number formats."""
