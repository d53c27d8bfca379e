"""Finds out at which site this host is: collects the evidence for each profile and compares the scores."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.resolve import named_site
from slurmddp.job.site import Detect
from slurmddp.sites.catalogue import Catalogue, config_files
from slurmddp.sites.host import ClusterName, Host, this_host

#: A stronger kind outweighs all weaker ones together. Users and jobs carry variables from one cluster to another;
#: a short host name such as login1 or uan01 is used at many sites.
_CLUSTER, _DOMAIN, _VARIABLE, _FILE, _SHORT_NAME = 8, 8, 4, 2, 1


class Evidence(NamedTuple):
    """One rule of a profile that matches this host. key: of `detect`; text: what matched."""

    key: str
    pattern: str
    score: int
    text: str


class Candidate(NamedTuple):
    """A profile with rules that match this host. excluded: why it is out of the question all the same."""

    site: str
    evidence: tuple[Evidence, ...]
    excluded: str | None = None

    @property
    def score(self) -> int:
        """The sum over the kinds of evidence, each counted once."""
        kinds: dict[str, int] = {}
        for item in self.evidence:
            kinds[item.key] = max(kinds.get(item.key, 0), item.score)
        return 0 if self.excluded else sum(kinds.values())

    @property
    def why(self) -> str:
        """Return what matched, the strongest first."""
        return "; ".join(dict.fromkeys(item.text for item in sorted(self.evidence, key=lambda item: -item.score)))


class Survey(NamedTuple):
    """All that detection found: Slurm's ClusterName if known, and the candidates, the best first."""

    cluster: ClusterName | None
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The candidates with the highest score: none, one, or a tie."""
        return tuple(item for item in self.candidates if 0 < item.score == self.candidates[0].score)


def detect(catalogue: Catalogue, host: Host) -> tuple[str, str] | None:
    """Return (site, why), or None if no profile matches. Raises UserError for a tie."""
    return decide(survey(catalogue, host))


def decide(found: Survey) -> tuple[str, str] | None:
    """Return the best candidate and why it is the best. Raises UserError for a tie."""
    best = found.best
    if not best:
        return None
    site = best[0].site
    if len(best) > 1:
        number = "two" if len(best) == 2 else len(best)
        each = " and ".join(f"{item.site} ({item.why})" for item in best)
        todo = f"select one: --site {site}, or `site: {site}` in the job file or in ~/.config/slurmddp/config.yaml"
        raise UserError(f"this host matches {number} sites equally well: {each}", todo=todo)
    return site, f"detected: {best[0].why}"


def survey(catalogue: Catalogue, host: Host, *, ask: bool = False) -> Survey:
    """Collect the evidence for all profiles. ask: run scontrol even if the rest already decides."""
    rules = {name: catalogue.detection(name) for name in catalogue.names()}
    cluster = host.cluster_name()
    candidates = _candidates(rules, host, cluster)
    if cluster is None and any(rule.cluster_names for rule in rules.values()) and (ask or len(candidates.best) != 1):
        cluster = host.ask_slurm()
        return _candidates(rules, host, cluster)
    return candidates


def _candidates(rules: dict[str, Detect], host: Host, cluster: ClusterName | None) -> Survey:
    candidates = []
    for site, rule in rules.items():
        evidence = tuple(_evidence(rule, host, cluster))
        if evidence:
            candidates.append(Candidate(site, evidence, _contradiction(rule, cluster)))
    return Survey(cluster, tuple(sorted(candidates, key=lambda item: -item.score)))


def _evidence(rule: Detect, host: Host, cluster: ClusterName | None) -> Iterator[Evidence]:
    for pattern in rule.cluster_names:
        if cluster is not None and _same_name(cluster, pattern):
            text = f"Slurm's ClusterName is {cluster.value}, from {cluster.source}"
            yield Evidence("cluster_names", pattern, _CLUSTER, text)
    for pattern in rule.hostnames:
        if fnmatchcase(host.name, pattern):
            has_domain = "." in re.split(r"[*?\]]", pattern)[-1]
            score = _DOMAIN if has_domain else _SHORT_NAME
            yield Evidence("hostnames", pattern, score, f"this host is {host.name}")
    for variable, pattern in rule.environment.items():
        value = host.environment.get(variable)
        if value is not None and (pattern == "*" or fnmatchcase(value, pattern)):
            yield Evidence("environment", f"{variable}: {pattern}", _VARIABLE, f"${variable} is {value}")
    for path, pattern in rule.files.items():
        if pattern == "*" and host.exists(path):
            yield Evidence("files", f"{path}: *", _FILE, f"{path} exists")
        elif pattern != "*":
            lines = (line.strip() for line in (host.text(path) or "").splitlines())
            if line := next((line for line in lines if fnmatchcase(line, pattern)), None):
                yield Evidence("files", f"{path}: {pattern}", _FILE, f"{path} contains {line}")


def _contradiction(rule: Detect, cluster: ClusterName | None) -> str | None:
    """Say why the profile is another cluster's, whatever else matches; None if nothing contradicts it."""
    if cluster is None or not rule.cluster_names or any(_same_name(cluster, name) for name in rule.cluster_names):
        return None
    names = " or ".join(rule.cluster_names)
    return f"Slurm's ClusterName is {cluster.value}, from {cluster.source}; the profile is for {names}"


def _same_name(cluster: ClusterName, pattern: str) -> bool:
    return fnmatchcase(cluster.value.lower(), pattern.lower())


def select(catalogue: Catalogue, environment: Mapping[str, str], option: str | None = None) -> tuple[str, str] | None:
    """Return (site, why): --site, SLURMDDP_SITE, the configuration file, then detection; None if nothing matches.

    Raises UserError for a tie.
    """
    if option is not None:
        return option, "--site"
    return named_site(environment, config_files(environment)) or detect(catalogue, this_host(environment))
