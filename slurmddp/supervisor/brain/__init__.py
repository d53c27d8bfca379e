"""What the supervisor decides, and nothing else: no file, no process, no clock of its own.

The loop hands in what it knows (an event, the facts of a look around, the facts of an attempt that has ended) and the
time, and gets back actions to carry out or a decision. All of it can be tested in process.
"""
