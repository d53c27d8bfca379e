"""Reading the user's training script."""
