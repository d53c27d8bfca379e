"""Images in a real registry."""

import gzip
import hashlib
import http.client
import io
import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.registry.client import resolve
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference
from slurmddp.images.registry.settings import RegistrySettings
from tests.registry import Kind, Pushed, Registry, bcrypt
from tests.registry_answers import Certificate, Proxy, TokenService

TORCH = {
    "created": "2025-04-24T04:22:08Z",
    "config": {
        "Env": [
            "PATH=/usr/local/bin:/usr/bin",
            "CUDA_VERSION=12.9.0.036",
            "CUDA_DRIVER_VERSION=575.51.02",
            "PYTORCH_BUILD_VERSION=2.7.0a0+79aa174",
            "NCCL_VERSION=2.26.3",
            "NCCL_IB_HCA==mlx5_0,mlx5_1",
        ],
        "Entrypoint": ["/opt/nvidia/nvidia_entrypoint.sh"],
        "Labels": {"com.nvidia.build.id": "1"},
    },
}


def layer(size: int = 3) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        entry = tarfile.TarInfo("a")
        entry.size = size
        archive.addfile(entry, io.BytesIO(b"x" * size))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["oci", "docker"])
def test_an_image_of_nvidia(registry: Registry, kind: Kind) -> None:
    layers = [layer(), layer(1000)]
    pushed = registry.push("nvidia/pytorch", "25.04-py3", TORCH, layers, kind=kind)
    name = registry.reference("nvidia/pytorch", "25.04-py3")
    image = resolve(name, architecture="x86_64", settings=RegistrySettings())
    assert image == RegistryImage(
        reference=parse_reference(name),
        digest=pushed.digest,
        platform_digest=pushed.digest,
        architecture="amd64",
        os="linux",
        env={
            "PATH": "/usr/local/bin:/usr/bin",
            "CUDA_VERSION": "12.9.0.036",
            "CUDA_DRIVER_VERSION": "575.51.02",
            "PYTORCH_BUILD_VERSION": "2.7.0a0+79aa174",
            "NCCL_VERSION": "2.26.3",
            "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        },
        entrypoint=("/opt/nvidia/nvidia_entrypoint.sh",),
        created="2025-04-24T04:22:08Z",
        size=sum(len(one) for one in layers),
    )
    versions = tuple(image.versions[name] for name in ("driver", "cuda", "torch", "nccl"))
    assert versions == ("575.51.02", "12.9.0.036", "2.7.0a0+79aa174", "2.26.3")
    assert image.reference.repository == f"{registry.host}/nvidia/pytorch"
    again = resolve(f"{image.reference.repository}@{image.digest}", architecture="amd64")
    assert (again.digest, again.env) == (image.digest, image.env)


@pytest.mark.parametrize(
    ("written", "read"),
    [("2.17.1-1", "2.17.1"), ("2.15.5-1+cuda11.8", "2.15.5"), ("2.26.3", "2.26.3"), ("2.27.0rc1", "2.27.0rc1")],
)
def test_the_revision_of_a_package_is_no_part_of_nccls_version(written: str, read: str) -> None:
    image = RegistryImage(parse_reference("a"), "", "", "amd64", "linux", {"NCCL_VERSION": written})
    assert image.versions["nccl"] == read


def test_an_image_that_says_nothing_of_itself(registry: Registry) -> None:
    registry.push("plain", "latest", {})
    image = resolve(registry.reference("plain"), architecture="amd64")
    assert (dict(image.env), image.entrypoint, image.created) == ({}, None, None)
    versions = tuple(image.versions[name] for name in ("driver", "cuda", "torch", "nccl"))
    assert versions == (None, None, None, None) and image.size == 0


def both(registry: Registry, kind: Kind) -> tuple[Pushed, Pushed, Pushed]:
    """An index as Docker's buildkit writes it, with an attestation."""
    amd = registry.push("lab/a", None, TORCH, [layer()], kind=kind)
    arm = registry.push("lab/a", None, {"architecture": "arm64", "config": {"Env": ["A=arm"]}}, [layer(7)], kind=kind)
    proof = registry.push("lab/a", None, {"architecture": "unknown"}, kind=kind)
    attestation = Pushed(proof.digest, proof.size, proof.media_type, None)
    return amd, arm, registry.push_index("lab/a", "1", [attestation, arm, amd], kind=kind)


@pytest.mark.parametrize("kind", ["oci", "docker"])
def test_the_image_of_an_index_for_an_architecture(registry: Registry, kind: Kind) -> None:
    amd, arm, index = both(registry, kind)
    name = registry.reference("lab/a", "1")
    for asked, pushed, env in (("arm64", arm, {"A": "arm"}), ("aarch64", arm, {"A": "arm"}), ("amd64", amd, None)):
        image = resolve(name, architecture=asked)
        assert (image.digest, image.platform_digest) == (index.digest, pushed.digest)
        assert image.architecture == pushed.architecture and (env is None or image.env == env)
    by_digest = resolve(registry.reference("lab/a", index.digest), architecture="arm64")
    assert (by_digest.digest, by_digest.platform_digest) == (index.digest, arm.digest)
    here = {"x86_64": amd, "aarch64": arm}.get(platform.machine())
    if here:
        assert resolve(name).platform_digest == here.digest


def test_an_image_of_another_architecture(registry: Registry) -> None:
    both(registry, "oci")
    with pytest.raises(UserError) as error:
        resolve(registry.reference("lab/a", "1"), architecture="ppc64le")
    assert "is not available for ppc64le; it has: amd64, arm64\n  -> use an image" in str(error.value)
    registry.push("lab/arm", "1", {"architecture": "arm64"})
    with pytest.raises(UserError, match="is not available for amd64; it has: arm64"):
        resolve(registry.reference("lab/arm", "1"), architecture="amd64")
    registry.push("lab/win", "1", {"os": "windows"})
    with pytest.raises(UserError, match="is not available for amd64; it has: windows/amd64"):
        resolve(registry.reference("lab/win", "1"), architecture="amd64")


def test_what_is_not_there(registry: Registry) -> None:
    pushed = registry.push("lab/a", "1", {})
    for name, tag, message in (
        ("lab/a", "2", "lab/a:2 does not exist: .* has no such tag"),
        ("lab/b", "1", "lab/b:1 does not exist: .* has no such tag|has no image of this name"),
        ("lab/a", "sha256:" + "0" * 64, "does not exist at .*, or was removed: registries remove images"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(registry.reference(name, tag), architecture="amd64")
    image = resolve(registry.reference("lab/a", "1"), architecture="amd64")
    registry.delete_manifest("lab/a", pushed.digest)
    with pytest.raises(UserError, match=r"or was removed.*\n  -> pin the tag again"):
        resolve(f"{image.reference.repository}@{image.digest}", architecture="amd64")


def test_what_is_no_image(registry: Registry) -> None:
    registry.push("lab/chart", "1", {}, config_type="application/vnd.sylabs.sif.config.v1+json")
    with pytest.raises(UserError, match=r"is not a container image, but 'application/vnd\.sylabs\.sif"):
        resolve(registry.reference("lab/chart", "1"), architecture="amd64")


def test_a_registry_that_has_lost_a_configuration(registry: Registry) -> None:
    config = registry.push("lab/a", "1", {}).config or ""
    blob = registry.storage / "docker/registry/v2/blobs/sha256" / config[7:9] / config[7:] / "data"
    whole = blob.read_bytes()
    blob.write_bytes(whole.replace(b"linux", b"xunil"))
    with pytest.raises(ExternalError, match="sent wrong data for the configuration of"):
        resolve(registry.reference("lab/a", "1"), architecture="amd64")
    blob.unlink()
    with pytest.raises(ExternalError, match=r"has no configuration of .* \(status 404\), though it lists it"):
        resolve(registry.reference("lab/a", "1"), architecture="amd64")


def test_a_private_registry(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Registry.started(tmp_path, users={"ann": "pa:ss wörd"}) as registry:
        pushed = registry.push("lab/a", "1", TORCH, [layer()])
        name = registry.reference("lab/a", "1")
        with pytest.raises(UserError) as error:
            resolve(name, architecture="amd64")
        said = str(error.value)
        assert "(status 401), but no credentials were found" in said
        assert f"`apptainer registry login docker://{registry.host}`" in said and "~/.docker/config.json" in said
        login = {"auths": {registry.host: {"username": "ann", "password": "pa:ss wörd"}}}
        (home / ".apptainer").mkdir()
        (home / ".apptainer/docker-config.json").write_text(json.dumps(login))
        assert resolve(name, architecture="amd64").digest == pushed.digest
        monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", registry.host)
        monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
        monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "S3CRET")
        with pytest.raises(UserError) as error:
            resolve(name, architecture="amd64")
        said = str(error.value)
        assert "the login from APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD" in said
        assert "S3CRET" not in said and error.value.__cause__ is None


def test_a_registry_with_a_token_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Registry.started(tmp_path) as open_to_all:
        for name in ("lab/public", "lab/own"):
            open_to_all.push(name, "1", TORCH)
    tokens = TokenService(tmp_path, {"ann": "S3CRET"}, frozenset({"lab/public"}))
    with tokens, Registry.started(tmp_path, token=tokens.configuration) as registry:
        assert resolve(registry.reference("lab/public", "1"), architecture="amd64").versions["cuda"] == "12.9.0.036"
        assert [request.headers.get("authorization") for request in tokens.requests] == [None]
        with pytest.raises(UserError, match=r"requires a login for .* \(status 401\)"):
            resolve(registry.reference("lab/own", "1"), architecture="amd64")
        monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", registry.host)
        monkeypatch.setenv("SINGULARITY_DOCKER_USERNAME", "ann")
        monkeypatch.setenv("SINGULARITY_DOCKER_PASSWORD", "S3CRET")
        tokens.requests.clear()
        assert resolve(registry.reference("lab/own", "1"), architecture="amd64").size == 0
        assert [request.query["scope"] for request in tokens.requests] == ["repository:lab/own:pull"]
        monkeypatch.setenv("SINGULARITY_DOCKER_PASSWORD", "wrong")
        with pytest.raises(UserError, match="the login from SINGULARITY_DOCKER_USERNAME"):
            resolve(registry.reference("lab/own", "1"), architecture="amd64")


def test_a_mirror(registry: Registry) -> None:
    pushed = registry.push("hub/library/ubuntu", "22.04", {"config": {"Env": ["A=mirror"]}})
    settings = RegistrySettings(mirrors={"docker.io": f"{registry.host}/hub"})
    image = resolve("ubuntu:22.04", architecture="amd64", settings=settings)
    assert (image.digest, image.env) == (pushed.digest, {"A": "mirror"})
    assert image.reference.repository == "docker.io/library/ubuntu"
    location = settings.location(image.reference)
    assert location.repository == f"{registry.host}/hub/library/ubuntu"


def test_a_proxy_over_plain_http(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.push("lab/a", "1", {})
    port = int(registry.host.rpartition(":")[2])
    insecure = frozenset({"registry.example"})
    with Proxy(port, "u:S3CRET") as proxy:
        settings = RegistrySettings(proxy=f"http://u:S3CRET@{proxy.host}", insecure=insecure)
        assert resolve("registry.example:5000/lab/a:1", architecture="amd64", settings=settings).os == "linux"
        assert proxy.requests[0].path == "http://registry.example:5000/v2/lab/a/manifests/1"
        settings = RegistrySettings(insecure=insecure)
        monkeypatch.setenv("http_proxy", f"http://u:wrong@{proxy.host}")
        with pytest.raises(ExternalError, match=r"the proxy for registry.example requires a user name"):
            resolve("registry.example/lab/a:1", architecture="amd64", settings=settings)


def test_tls_straight_and_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Certificate.made(tmp_path, "DNS:registry.example", "IP:127.0.0.1")
    with Registry.started(tmp_path, tls=(made.certificate, made.key)) as registry:
        pushed = registry.push("lab/a", "1", {})
        port = int(registry.host.rpartition(":")[2])
        straight = RegistrySettings(mirrors={"registry.example": f"https://{registry.host}"})
        with pytest.raises(ExternalError) as error:
            resolve("registry.example/lab/a:1", architecture="amd64", settings=straight)
        assert f"the TLS certificate of {registry.host} is not trusted: self" in str(error.value)
        assert "export SSL_CERT_FILE=FILE" in str(error.value)
        monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
        assert resolve("registry.example/lab/a:1", architecture="amd64", settings=straight).digest == pushed.digest
        with Proxy(port, "u:S3CRET") as proxy:
            monkeypatch.setenv("HTTPS_PROXY", f"http://u:S3CRET@{proxy.host}")
            assert resolve("registry.example/lab/a:1", architecture="amd64").digest == pushed.digest
            assert [(one.method, one.path) for one in proxy.requests] == [("CONNECT", "registry.example:443")]
            with pytest.raises(ExternalError, match=r"certificate of other\.example is not trusted: Hostname mismatch"):
                resolve("other.example/lab/a:1", architecture="amd64")
            monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.host}")
            with pytest.raises(
                ExternalError, match=rf"the proxy {proxy.host} for .* refuses .*\(status 407\)\n  -> it requires"
            ):
                resolve("registry.example/lab/a:1", architecture="amd64")


def test_one_request_for_the_manifest_and_one_for_the_configuration(registry: Registry) -> None:
    registry.push("lab/one", "1", TORCH, [layer()])
    both(registry, "oci")
    with Proxy(int(registry.host.rpartition(":")[2])) as proxy:
        settings = RegistrySettings(proxy=proxy.host, insecure=frozenset({"registry.example"}))
        for name, kinds in (("lab/one", ["manifests", "blobs"]), ("lab/a", ["manifests", "manifests", "blobs"])):
            proxy.requests.clear()
            resolve(f"registry.example/{name}:1", architecture="amd64", settings=settings)
            assert [request.path.split("/")[-2] for request in proxy.requests] == kinds
            assert len({request.peer for request in proxy.requests}) == 1, "one connection"


def test_what_is_pushed_can_be_pulled_and_files_are_streamed(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "layer.tar.gz"
    path.write_bytes(layer(5000))
    registry.push("lab/a", "1", {}, [path, gzip.decompress(layer())])
    connection = http.client.HTTPConnection(registry.host, timeout=20)
    connection.request("GET", "/v2/lab/a/manifests/1", headers={"Accept": "application/vnd.oci.image.manifest.v1+json"})
    manifest = json.loads(connection.getresponse().read())
    kinds = [one["mediaType"].rpartition(".")[2] for one in manifest["layers"]]
    assert kinds == ["tar+gzip", "tar"]
    connection.request("GET", f"/v2/lab/a/blobs/{manifest['layers'][0]['digest']}")
    assert connection.getresponse().read() == path.read_bytes()
    connection.request("GET", f"/v2/lab/a/blobs/{manifest['config']['digest']}")
    unpacked = json.loads(connection.getresponse().read())["rootfs"]["diff_ids"]
    connection.close()
    tars = [gzip.decompress(one) for one in (layer(5000), layer())]
    assert unpacked == ["sha256:" + hashlib.sha256(one).hexdigest() for one in tars]


def test_without_the_program_a_test_is_skipped_or_fails_where_all_has_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURMDDP_REQUIRE_CLUSTER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Debian package docker-registry"):
        Registry.started(tmp_path).__enter__()
    assert "docker-registry is not installed" in capsys.readouterr().out
    monkeypatch.setenv("SLURMDDP_REQUIRE_CLUSTER", "1")
    with pytest.raises(pytest.fail.Exception, match="Debian package docker-registry"):
        Registry.started(tmp_path).__enter__()


def test_a_password_file_of_the_tests_registry_is_salted() -> None:
    assert bcrypt("a") != bcrypt("a") and bcrypt("a").startswith("$2b$04$")


def test_the_import_loads_no_network_library() -> None:
    program = (
        "import sys; import slurmddp.images.registry.client; "
        "names = ('http.client', 'ssl', 'urllib.request', 'urllib3', 'pydantic'); "
        "print([name for name in names if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"
