"""For all tests: hypothesis measures no time here. A machine that is busy is no defect."""

from hypothesis import settings

settings.register_profile("slurmddp", deadline=None)
settings.load_profile("slurmddp")
