"""Stop in time, and detect a lack of progress: signals, heartbeats, hangs, markers."""
