"""What was asked for: validated models, and for every value the layer that it came from."""
