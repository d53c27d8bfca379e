"""Why Slurm lets a job wait, in plain words."""

#: squeue(1), "JOB REASON CODES", and src/common/job_state_reason.c: those that users meet.
_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "others have a higher priority",
    "Resources": "it is next, as soon as enough nodes are free",
    "BeginTime": "it may not start before its begin time",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for did not end as required: cancel this job and submit again",
    "JobHeldUser": "you hold it: `scontrol release` lets it start",
    "JobHeldAdmin": "an administrator holds it: ask the site's support",
    "JobHoldMaxRequeue": "it was requeued too often, and is held: ask the site's support",
    "JobArrayTaskLimit": "its job array already runs as many tasks as it is allowed to",
    "Licenses": "a licence that it needs is in use",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation no longer exists: cancel it and submit again",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition starts no jobs at present",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: it will never start",
    "PartitionTimeLimit": "its time limit is longer than the partition allows: it will never start",
    "PartitionConfig": "it asks for resources that the partition does not have",
    "BadConstraints": "no node has what it asks for: it will never start",
    "AccountNotAllowed": "its account may not use the partition or QOS",
    "QOSNotAllowed": "its QOS may not be used in this partition",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "Cleaning": "Slurm is still cleaning up after its last start",
    "Prolog": "the site's prolog script is still running on its nodes",
    "NodeFail": "a node failed",
    "SchedDefer": "Slurm is busy and will look at it later",
    "DeadLine": "it cannot end before its deadline",
    "launch failed requeued held": "its start failed, and Slurm holds it: `scontrol release` lets it start",
}

#: Slurm starts a job with one of these only after somebody has released it.
_HELD = (
    "JobHeldUser",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "launch failed requeued held",
    "job requeued in held state",
)

#: Limits, by how their names begin and what they contain.
_OWNERS = (("QOS", "its QOS"), ("Assoc", "your account"))


def is_held(reason: str) -> bool:
    """Return whether a job that waits for this reason starts only after its release: no start time is known then."""
    return reason.split(",")[0].strip().replace("_", " ") in _HELD


def reason_text(reason: str) -> str:
    """Return one of Slurm's reasons in plain words; the reason itself if nobody has explained it."""
    name = reason.split(",")[0].strip()
    if text := _REASONS.get(name) or _REASONS.get(name.replace("_", " ")):  # scontrol has no spaces there
        return text
    for begin, owner in _OWNERS:
        if name.startswith(begin) and ("Max" in name or "Grp" in name or "Limit" in name):
            who = "you use" if "PerUser" in name or "Max" in name else "its users together use"
            return f"{who} as much as {owner} allows: it starts when other jobs end"
    return name
