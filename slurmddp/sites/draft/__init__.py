"""`slurmddp site init`: a site profile drafted from what the live cluster says."""
