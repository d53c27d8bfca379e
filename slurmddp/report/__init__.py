"""What people are shown. Reads the run folder and the plan, never a live object."""
