"""What a run finds out about itself: times, means, use of the machine, stragglers."""
