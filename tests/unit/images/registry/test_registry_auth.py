"""Challenges, and who gets to see the credentials."""

import base64
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.registry.auth import Challenge, parse_challenges
from slurmddp.images.registry.client import resolve
from slurmddp.images.registry.documents import digest_of
from slurmddp.images.registry.settings import RegistrySettings
from tests.registry_answers import Proxy, Reply, Request, Server

CONFIG = json.dumps({"architecture": "amd64", "os": "linux"}).encode()
SECRET = "S3CRET"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], []),
        (['Bearer realm="https://a.io/t",service="s",scope="repository:a/b:pull,push"'],
         [("bearer", {"realm": "https://a.io/t", "service": "s", "scope": "repository:a/b:pull,push"})]),
        (['BASIC Realm = "x \\"y\\""'], [("basic", {"realm": 'x "y"'})]),
        (["Negotiate, Basic realm=x, Bearer realm=y, service=z"],
         [("negotiate", {}), ("basic", {"realm": "x"}), ("bearer", {"realm": "y", "service": "z"})]),
        (["Negotiate", 'Bearer realm="y"'], [("negotiate", {}), ("bearer", {"realm": "y"})]),
        (['realm="nobodys"', '"'], []),
    ],
)  # fmt: skip
def test_challenges(headers: list[str], expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(headers) == [Challenge(*one) for one in expected]


@settings(max_examples=50)
@given(st.lists(st.text(max_size=60) | st.text(alphabet='ab=," \\', max_size=60), max_size=2))
def test_no_header_breaks_it(headers: list[str]) -> None:
    for challenge in parse_challenges(headers):
        assert challenge.scheme


class Guarded:
    """A registry with one image behind a challenge; `blob` is what it answers about the configuration."""

    def __init__(self, challenge: str, accepted: str, blob: Reply | None = None) -> None:
        self.challenge, self.accepted, self.blob = challenge, accepted, blob or Reply(200, CONFIG)
        media_type = "application/vnd.oci.image.config.v1+json"
        config = {"mediaType": media_type, "digest": digest_of(CONFIG), "size": len(CONFIG)}
        self.manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": []}).encode()

    def __call__(self, request: Request) -> Reply:
        if request.path.startswith("/token"):
            shown = request.headers.get("authorization", "")
            password = base64.b64decode(shown.removeprefix("Basic ")).decode().partition(":")[2]
            # An answer that repeats what it was sent: nothing of it may be shown
            return Reply(200, b'{"access_token": "T0KEN"}') if password == SECRET else Reply(401, shown.encode())
        if request.headers.get("authorization") != self.accepted:
            return Reply(401, b"", {"WWW-Authenticate": self.challenge})
        return self.blob if "/blobs/" in request.path else Reply(200, self.manifest)


def bearer(server_host: str, **more: str) -> str:
    parameters = {"realm": f"http://{server_host}/token", "service": "s v", **more}
    return "Bearer " + ",".join(f'{key}="{value}"' for key, value in parameters.items())


Named = Callable[[str], None]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Named:
    """Credentials in the environment; called with the registry that they are for."""
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", SECRET)
    return lambda host: monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", host)


def seen(server: Server) -> list[tuple[str, str]]:
    return [(request.path.split("?")[0], request.headers.get("authorization", "")) for request in server.requests]


def test_a_token_is_asked_for_once_and_only_to_pull(named: Named) -> None:
    guarded = Guarded("", "Bearer T0KEN")
    with Server(guarded) as server:
        named(server.host)
        guarded.challenge = bearer(server.host, scope="repository:a/b:pull,push repository:h:5000/c:*")
        resolve(f"{server.host}/a/b", architecture="amd64")
        paths = [path for path, _ in seen(server)]
        assert [path.split("/")[-2] for path in paths] == ["manifests", "", "manifests", "blobs"]
        token = server.requests[1]
        assert token.query == {"service": "s v", "scope": "repository:a/b:pull repository:h:5000/c:pull"}
        assert token.headers["authorization"] == "Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()


def test_a_token_service_that_says_no_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "WR0NG")
    guarded = Guarded("", "Bearer T0KEN")
    with Server(guarded) as server:
        monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", server.host)
        guarded.challenge = bearer(server.host)
        with pytest.raises(UserError) as error:
            resolve(f"{server.host}/a/b", architecture="amd64")
    said = str(error.value)
    assert "denies access" in said and "the login from APPTAINER_DOCKER_USERNAME" in said and "status 401" in said
    assert "WR0NG" not in said and base64.b64encode(b"ann:WR0NG").decode() not in said


def test_a_redirect_to_another_host_gets_no_credentials(named: Named) -> None:
    accepted = "Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()
    with Server(lambda request: Reply(200, CONFIG)) as store:
        for place, status in ((f"http://{store.host}/blob?signature=a b", 307), (f"//{store.host}/blob", 302)):
            store.requests.clear()
            with Server(Guarded('Basic realm="x"', accepted, Reply(status, b"", {"Location": place}))) as server:
                named(server.host)
                assert resolve(f"{server.host}/a/b", architecture="amd64").os == "linux"
                assert seen(server)[-1][1] == accepted
            assert seen(store) == [("/blob", "")]


def test_a_redirect_within_a_host_keeps_them(named: Named) -> None:
    accepted = "Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()
    guarded = Guarded('Basic realm="x"', accepted)

    def moved(request: Request) -> Reply:
        away = request.path.startswith("/v2/a/b/blobs")
        return Reply(307, b"", {"Location": "/else/blobs/x"}) if away else guarded(request)

    with Server(moved) as server:
        named(server.host)
        resolve(f"{server.host}/a/b", architecture="amd64")
        assert seen(server)[-1] == ("/else/blobs/x", accepted)


def test_a_store_that_wants_to_know_who_asks_is_told_nothing(named: Named) -> None:
    with Server(lambda request: Reply(401, b"", {"WWW-Authenticate": 'Basic realm="mine"'})) as store:
        guarded = Guarded("", "", Reply(307, b"", {"Location": f"http://{store.host}/blob"}))
        guarded.accepted = None  # type: ignore[assignment]  # everybody's
        with (
            Server(guarded) as server,
            pytest.raises(ExternalError, match=r"has no configuration of .* though it lists"),
        ):
            resolve(f"{server.host}/a/b", architecture="amd64")
        assert seen(store) == [("/blob", "")]


def test_credentials_never_go_over_plain_http_to_a_host_that_is_not_listed(named: Named) -> None:
    guarded = Guarded('Bearer realm="http://tokens.example/t"', "Bearer T0KEN")
    with Server(guarded) as server, Proxy(server.port) as proxy:
        named(server.host)
        settings = RegistrySettings(proxy=f"http://{proxy.host}")
        with pytest.raises(UserError) as error:
            resolve(f"{server.host}/a/b", architecture="amd64", settings=settings)
        said = str(error.value)
        assert said.startswith("tokens.example would send a token") and "over plain HTTP, which is not allowed" in said
        assert proxy.requests == [] and all(not shown for _, shown in seen(server))


def test_a_mirror_is_not_shown_the_environments_credentials(named: Named) -> None:
    with Server(Guarded('Basic realm="x"', "nobody's")) as mirror:
        settings = RegistrySettings(mirrors={"nvcr.io": mirror.host})
        named("nvcr.io")
        with pytest.raises(UserError, match=r"are only for nvcr\.io"):
            resolve("nvcr.io/a/b", architecture="amd64", settings=settings)
        assert [shown for _, shown in seen(mirror)] == [""]


def test_a_host_that_a_dockerfile_names_is_not_shown_the_environments_credentials(named: Named) -> None:
    with Server(Guarded("", "nobody's")) as evil:
        evil_guarded = Guarded(bearer(evil.host), "nobody's")
        for challenge in (bearer(evil.host), 'Basic realm="x"'):
            evil_guarded.challenge = challenge
            with Server(evil_guarded) as server:
                for host in (None, "ghcr.io", "nvcr.io"):
                    if host:
                        named(host)
                    with pytest.raises((UserError, ExternalError)):
                        resolve(f"{server.host}/a/b", architecture="amd64")
                assert seen(server) and all(not shown for _, shown in seen(server) + seen(evil))


@pytest.mark.parametrize(
    "realm", ["http://127.0.0.1:PORT/token", "http://localhost:PORT/token", "https://[::1]:PORT/t"]
)
def test_a_realm_on_this_machine_is_for_registries_on_this_machine(realm: str) -> None:
    with Server(lambda request: Reply(200, b'{"token": "x"}')) as local:
        guarded = Guarded(f'Bearer realm="{realm.replace("PORT", str(local.port))}"', "Bearer x")
        with Server(guarded) as server, Proxy(server.port) as proxy:
            settings = RegistrySettings(insecure=frozenset({"lab.example"}), proxy=f"http://{proxy.host}")
            with pytest.raises(ExternalError, match=r"lab\.example refers to this machine itself"):
                resolve("lab.example/a/b", architecture="amd64", settings=settings)
        assert local.requests == []


def test_a_redirect_to_this_machine_is_for_registries_on_this_machine() -> None:
    with Server(lambda request: Reply(200, CONFIG)) as local:
        guarded = Guarded("", "", Reply(307, b"", {"Location": f"http://{local.host}/admin"}))
        guarded.accepted = None  # type: ignore[assignment]  # everybody's
        with Server(guarded) as server, Proxy(server.port) as proxy:
            settings = RegistrySettings(insecure=frozenset({"lab.example"}), proxy=f"http://{proxy.host}")
            with pytest.raises(ExternalError, match=r"lab\.example redirects to this machine itself \(127\.0\.0\.1"):
                resolve("lab.example/a/b", architecture="amd64", settings=settings)
        assert local.requests == []


@pytest.mark.parametrize(
    ("challenge", "kind", "message"),
    [
        ("Negotiate", ExternalError, "asks for an unsupported kind of login"),
        ("", UserError, "requires a login for 127.0.0.1:PORT/a/b:latest (status 401), but no credentials"),
        ('Basic realm="x"', UserError, "(status 401), but no credentials were found"),
        ('Bearer realm="ftp://x"', ExternalError, "gives no address for tokens"),
        ('Bearer realm="http://["', ExternalError, "gives no address for tokens"),
        ('Bearer realm="http://127.0.0.1:PORT/odd"', ExternalError, "answered the token request for"),
        ('Bearer realm="http://127.0.0.1:PORT/lost"', ExternalError, "has no token service for"),
        ('Bearer realm="http://127.0.0.1:PORT/busy"', ExternalError, "limits the rate of requests and refuses a token"),
    ],
)
def test_challenges_that_cannot_be_answered(challenge: str, kind: type[Exception], message: str) -> None:
    odd = {
        "/odd": Reply(200, b'{"token": "a\\nX-Other: b"}'),
        "/lost": Reply(404),
        "/busy": Reply(429, b"", {"Retry-After": "7"}),
    }

    def answer(request: Request) -> Reply:
        shown = {"WWW-Authenticate": challenge.replace("PORT", str(server.port))} if challenge else {}
        return odd.get(request.path.split("?")[0]) or Reply(401, b"", shown)

    with Server(answer) as server:
        with pytest.raises(kind) as error:
            resolve(f"{server.host}/a/b", architecture="amd64")
        assert message.replace("PORT", str(server.port)) in str(error.value)
