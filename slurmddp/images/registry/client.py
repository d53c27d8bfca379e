"""Reads an image's digest and configuration from its registry: one manifest (two where it is an index), one blob."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmddp.images.registry import documents
from slurmddp.images.registry.auth import authorize, parse_challenges, refused
from slurmddp.images.registry.credentials import Found, find_credentials
from slurmddp.images.registry.deadline import within
from slurmddp.images.registry.failures import bad_status, not_found, outside
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
    """What the registry says of the image, for Linux on `architecture`.

    architecture: amd64 or x86_64, arm64 or aarch64, ...; None: this machine's.

    All of it takes at most `settings.timeout`, whatever the registry sends. Every byte that is read is held against its
    digest. Raises UserError (no such image, not for this architecture, not authorised) and ExternalError (what the
    registry or the way to it does wrong).
    """
    from slurmddp.images.registry.transport import Transport  # loads urllib3, ssl and http.client

    parsed = parse_reference(reference) if isinstance(reference, str) else reference
    wanted = documents.ARCHITECTURES.get(architecture or platform.machine(), architecture or platform.machine())
    settings = settings or RegistrySettings()
    location = settings.location(parsed)

    def ask() -> RegistryImage:
        with Transport(settings) as transport:
            return _resolve(_Repository(transport, location, parsed), wanted)

    try:
        return within(settings.timeout, ask)
    except TimeoutError:
        raise outside(
            f"{location.host} took more than {settings.timeout:g} s to answer about {parsed}",
            "try again later, or use a mirror; a registry answers within seconds",
        ) from None


class _Repository:
    """One repository: asks, and shows who it is once the registry wants to know."""

    def __init__(self, transport: Transport, location: Location, reference: Reference) -> None:
        self.location = location
        self.reference = reference
        self.image = str(reference)
        self._transport = transport
        self._authorization: str | None = None
        self._found: Found | None = None

    def manifest(self, selector: str, what: str) -> Answer:
        """The manifest or index of a tag or digest, whatever its status but for 401 and 403."""
        return self._get(f"manifests/{selector}", what, documents.INDEXES + documents.MANIFESTS)

    def blob(self, digest: str, what: str) -> Answer:
        return self._get(f"blobs/{digest}", what, ())

    def _get(self, path: str, what: str, accept: tuple[str, ...]) -> Answer:
        answer = self._ask(path, what, accept)
        # Where a redirect has led to a store, the store's own answer is no question for the registry's credentials
        if answer.status == 401 and self._authorization is None and not answer.redirected:
            self._found = find_credentials(self.location.registry, self.location.name)
            challenges = parse_challenges(answer.headers.getlist("WWW-Authenticate"))
            self._authorization = authorize(challenges, self._found, self.location, self._token, self.image)
            answer = self._ask(path, what, accept)
        if answer.status in (401, 403) and not answer.redirected:
            raise refused(answer.status, self.location, self._found or Found(None), self.image)
        return answer

    def _ask(self, path: str, what: str, accept: tuple[str, ...]) -> Answer:
        url = f"{self.location.url}/{path}"
        return self._transport.get(url, limit=LARGEST, what=what, authorization=self._authorization, accept=accept)

    def _token(self, url: str, authorization: str | None, limit: int, what: str) -> Answer:
        return self._transport.get(url, limit=limit, what=what, authorization=authorization)


def _resolve(repository: _Repository, architecture: str) -> RegistryImage:
    reference, image = repository.reference, repository.image
    answer = repository.manifest(reference.selector, f"the manifest of {image}")
    if answer.status == 404:
        raise not_found(answer.body, repository.location.host, image, reference.digest)
    tree, digest = _read(answer, reference.digest, f"the manifest of {image}")
    platform_digest = digest
    if documents.is_index(tree, answer.headers.get("Content-Type", ""), answer.origin.name, image):
        found = documents.platforms(tree, answer.origin.name, image)
        platform_digest = documents.choose(found, architecture, image).digest
        what = f"the {architecture} manifest of {image}"
        answer = repository.manifest(platform_digest, what)
        tree, _ = _read(answer, platform_digest, what)
        if documents.is_index(tree, answer.headers.get("Content-Type", ""), answer.origin.name, image):
            raise outside(f"{image} is an index of indexes, which container tools do not read either")
    manifest = documents.read_manifest(tree, answer.origin.name, image)
    return _image(repository, manifest, digest, platform_digest, architecture)


def _image(
    repository: _Repository, manifest: documents.Manifest, digest: str, platform_digest: str, architecture: str
) -> RegistryImage:
    what = f"the configuration of {repository.image}"
    if manifest.config_size > LARGEST:
        raise outside(f"{what} has {manifest.config_size} bytes; more than {LARGEST >> 20} MiB are not read")
    answer = repository.blob(manifest.config_digest, what)
    tree, _ = _read(answer, manifest.config_digest, what)
    host = answer.origin.name
    made_for, system, created = (_text(tree, key, host, what) for key in ("architecture", "os", "created"))
    if not made_for:
        raise documents.unreadable(host, what)
    if made_for != architecture or system not in ("linux", ""):
        raise documents.other_architecture(repository.image, architecture, [(system, made_for)])
    inner = tree.get("config")
    config: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
    return RegistryImage(
        reference=repository.reference,
        digest=digest,
        platform_digest=platform_digest,
        architecture=made_for,
        os=system or "linux",
        env=documents.variables(config.get("Env"), host, what),
        entrypoint=documents.words(config.get("Entrypoint"), host, what),
        workdir=_text(config, "WorkingDir", host, what) or None,
        user=_text(config, "User", host, what) or None,
        created=created or None,
        size=manifest.layers_size,
    )


def _read(answer: Answer, digest: str | None, what: str) -> tuple[Mapping[str, Any], str]:
    """The JSON object and the digest of its bytes, which is `digest` where one was asked for."""
    host = answer.origin.name
    if answer.status in (401, 403, 404):
        raise outside(
            f"{host} has no {what.removeprefix('the ')} (status {answer.status}), though it lists it",
            "push the image again, or try again later; a mirror may not have all of it",
        )
    if answer.status != 200:
        raise bad_status(answer.status, answer.headers, answer.body, host, what)
    told = answer.headers.get("Docker-Content-Digest")
    # JSON first: a login portal's page is no lie about a digest
    tree = documents.read_object(answer.body, host, what)
    for promised in (digest, told):
        if promised is not None and is_digest(promised):
            documents.verify(answer.body, promised, host, what)
    return tree, documents.digest_of(answer.body)


def _text(tree: Mapping[str, Any], key: str, host: str, what: str) -> str:
    value = tree.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise documents.unreadable(host, what)
    if not value.isprintable():
        raise documents.not_one_line(host, what, key)
    return value
