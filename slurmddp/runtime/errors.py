"""The errors that the runtime raises on purpose."""


class NamedError(Exception):
    """An error that ends the run with a message, no traceback, and exit code 1.

    `shared` says that every rank raises it at the same time, so that rank 0 alone needs to print it.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class RuntimeFailure(NamedError):
    """A failure of the run itself."""


class UserError(NamedError):
    """Something that the user can put right."""


class PeerError(RuntimeFailure):
    """Another rank failed; this one exits because it cannot continue alone. The other one prints the reason."""


class NotFiniteError(RuntimeFailure):
    """A loss or gradient that is not a finite number. Raised on every rank before the weights are touched.

    `culprit`: rank and node where it was made; None if all ranks made one, or nobody knows.
    """

    def __init__(self, message: str, *, shared: bool = False, culprit: tuple[int, str] | None = None) -> None:
        super().__init__(message, shared=shared)
        self.culprit = culprit


class ReplicasDifferError(RuntimeFailure):
    """Ranks that should hold the same parameters do not. Raised on every rank before anything is saved."""
