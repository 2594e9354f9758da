"""Facts of the target model, and its last step in numpy."""
