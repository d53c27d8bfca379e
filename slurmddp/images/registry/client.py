"""Reads an image's digest and configuration from its registry: one manifest (two where it is an index), one blob."""

from __future__ import annotations

import platform
from contextlib import closing
from typing import TYPE_CHECKING

from slurmddp.images.registry import documents
from slurmddp.images.registry.auth import authorize, parse_challenges, refused
from slurmddp.images.registry.credentials import Found, find_credentials
from slurmddp.images.registry.documents import Document, digest_of
from slurmddp.images.registry.failures import bad_status, not_found, outside, within
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import Reference, is_digest, parse_reference
from slurmddp.images.registry.settings import Location, RegistrySettings

if TYPE_CHECKING:
    from slurmddp.images.registry.transport import Answer, Transport

#: Bytes of a manifest and of a configuration; registries take no larger manifests (distribution-spec, "Pushing
#: Manifests"), and a configuration is a few kilobytes.
LARGEST = 4 << 20


def resolve(
    reference: Reference | str, *, architecture: str | None = None, settings: RegistrySettings | None = None
) -> RegistryImage:
    """Return what the registry says of the image, for Linux on `architecture`.

    architecture: amd64 or x86_64, arm64 or aarch64, ...; None: this machine's.

    All of it takes at most `settings.timeout`, whatever the registry sends. Every byte that is read is held against its
    digest. Raises UserError (no such image, not for this architecture, not authorised) and ExternalError (what the
    registry or the way to it does wrong).
    """
    from slurmddp.images.registry.transport import Transport  # loads urllib3, ssl and http.client

    parsed = parse_reference(reference) if isinstance(reference, str) else reference
    machine = documents.ARCHITECTURES.get(architecture or platform.machine(), architecture or platform.machine())
    settings = settings or RegistrySettings()
    location = settings.location(parsed)

    def ask() -> RegistryImage:
        with closing(Transport(settings)) as transport:
            return _resolve(_Repository(transport, location, parsed), machine)

    try:
        return within(settings.timeout, ask)
    except TimeoutError:
        todo = "try again later, or use a mirror"
        raise outside(f"{location.host} took more than {settings.timeout:g} s to answer about {parsed}", todo) from None


class _Repository:
    """One repository: asks, and shows who it is once the registry wants to know."""

    def __init__(self, transport: Transport, location: Location, reference: Reference) -> None:
        self.location = location
        self.reference = reference
        self.image = str(reference)
        self._transport = transport
        self._authorization: str | None = None
        self._found = Found(None)

    def manifest(self, selector: str, digest: str | None, what: str) -> tuple[Document, str, bool]:
        """Return the manifest or index, its digest (`digest`, if that is known), and whether it is an index."""
        answer = self._get(f"manifests/{selector}", what, documents.INDEXES + documents.MANIFESTS)
        if answer.status == 404 and selector == self.reference.selector:
            raise not_found(answer.body, self.location.host, self.image, digest)
        document = _read(answer, digest, what)
        index = documents.is_index(document, answer.headers.get("Content-Type", ""), self.image)
        return document, digest_of(answer.body), index

    def blob(self, digest: str, what: str) -> Document:
        return _read(self._get(f"blobs/{digest}", what, ()), digest, what)

    def _get(self, path: str, what: str, accept: tuple[str, ...]) -> Answer:
        answer = self._ask(path, what, accept)
        # Where a redirect has led to a store, the store's own answer is no question for the registry's credentials
        if answer.status == 401 and self._authorization is None and not answer.redirected:
            self._found = find_credentials(self.location.registry, self.location.name)
            challenges = parse_challenges(answer.headers.getlist("WWW-Authenticate"))
            self._authorization = authorize(challenges, self._found, self.location, self._transport, self.image)
            answer = self._ask(path, what, accept)
        if answer.status in (401, 403) and not answer.redirected:
            raise refused(answer.status, self.location, self._found, self.image)
        return answer

    def _ask(self, path: str, what: str, accept: tuple[str, ...]) -> Answer:
        url = f"{self.location.url}/{path}"
        return self._transport.get(url, limit=LARGEST, what=what, authorization=self._authorization, accept=accept)


def _read(answer: Answer, digest: str | None, what: str) -> Document:
    """Return the JSON object, whose bytes have to have this digest, and the one that the registry tells."""
    host = answer.origin.name
    if answer.status in (401, 403, 404):
        todo = "push the image again, or try again later; a mirror may be incomplete"
        raise outside(f"{host} has no {what.removeprefix('the ')} (status {answer.status}), though it lists it", todo)
    if answer.status != 200:
        raise bad_status(answer.status, answer.headers, answer.body, host, what)
    # JSON first: a login portal's page is no lie about a digest
    document = documents.read_object(answer.body, host, what)
    actual = digest_of(answer.body)
    for promised in (digest, answer.headers.get("Docker-Content-Digest")):
        if is_digest(promised) and promised != actual:
            todo = "try again; if it fails again, a proxy or mirror changes the data, or the registry is broken"
            raise outside(f"{host} sent wrong data for {what}: the digest is {actual}, not {promised}", todo)
    return document


def _resolve(repository: _Repository, architecture: str) -> RegistryImage:
    reference, image = repository.reference, repository.image
    what = f"the manifest of {image}"
    document, digest, index = repository.manifest(reference.selector, reference.digest, what)
    platform_digest = digest
    if index:
        platform_digest = documents.choose(document, architecture, image)
        what = f"the {architecture} manifest of {image}"
        document, _, index = repository.manifest(platform_digest, platform_digest, what)
    if index:
        raise outside(f"{image} is an index of indexes, which container tools do not support")
    manifest = documents.read_manifest(document, image)
    what = f"the configuration of {image}"
    if manifest.config_size > LARGEST:
        raise outside(f"{what} has {manifest.config_size} bytes; the limit is {LARGEST >> 20} MiB")
    configuration = repository.blob(manifest.config_digest, what)
    made_for, system = configuration.text("architecture"), configuration.text("os") or "linux"
    if not made_for:
        raise configuration.unreadable()
    if (made_for, system) != (architecture, "linux"):
        raise documents.other_architecture(image, architecture, [(system, made_for)])
    inner = configuration.tree.get("config")
    config = Document(inner if isinstance(inner, dict) else {}, configuration.host, what)
    return RegistryImage(
        reference, digest, platform_digest, architecture=made_for, os=system,
        env=config.variables("Env"), entrypoint=config.command("Entrypoint"), workdir=config.text("WorkingDir") or None,
        user=config.text("User") or None, shell=config.command("Shell"), triggers=config.texts("OnBuild"),
        created=configuration.text("created") or None, size=manifest.layers_size,
    )  # fmt: skip
