"""What can go wrong with the test cluster itself, as opposed to what is tested on it."""


class ClusterError(RuntimeError):
    """The cluster did something that it should not: a host that does not start, a wait that ran out."""


class ClusterUnavailable(ClusterError):
    """This machine cannot build or run the cluster; the message says what is missing."""
