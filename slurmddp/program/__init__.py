"""The user's training script: what it does about ranks, data, saves and stops, read without running a line of it."""
