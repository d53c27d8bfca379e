"""What keeps a node from starting its ranks."""


class Refused(Exception):
    """This node cannot start its ranks. The text says why, for people."""
