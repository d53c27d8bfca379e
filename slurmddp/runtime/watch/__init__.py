"""Stopping in time, and noticing what does not go on: signals, heartbeats, hangs, markers."""
