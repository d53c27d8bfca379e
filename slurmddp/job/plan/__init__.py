"""Every number and string that a job needs, computed once, before anything runs. Pure: reads nothing, calls nothing."""
