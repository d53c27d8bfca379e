"""Names of images, as Docker reads them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.images.registry.reference import Reference, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected", "whole"),
    [
        ("ubuntu", Reference("docker.io", "library/ubuntu", "latest"), "docker.io/library/ubuntu:latest"),
        ("ubuntu:22.04", Reference("docker.io", "library/ubuntu", "22.04"), "docker.io/library/ubuntu:22.04"),
        ("pytorch/pytorch", Reference("docker.io", "pytorch/pytorch", "latest"), "docker.io/pytorch/pytorch:latest"),
        ("docker.io/debian:12", Reference("docker.io", "library/debian", "12"), "docker.io/library/debian:12"),
        ("index.docker.io/a/b", Reference("docker.io", "a/b", "latest"), "docker.io/a/b:latest"),
        ("docker://nvcr.io/nvidia/pytorch:25.04-py3", Reference("nvcr.io", "nvidia/pytorch", "25.04-py3"),
         "nvcr.io/nvidia/pytorch:25.04-py3"),
        ("localhost/a", Reference("localhost", "a", "latest"), "localhost/a:latest"),
        ("host:5000/a/b__c:T", Reference("host:5000", "a/b__c", "T"), "host:5000/a/b__c:T"),
        ("[::1]:5000/a", Reference("[::1]:5000", "a", "latest"), "[::1]:5000/a:latest"),
        ("GHCR.io/a/b", Reference("ghcr.io", "a/b", "latest"), "ghcr.io/a/b:latest"),
        (f"ghcr.io/a/b@{DIGEST}", Reference("ghcr.io", "a/b", None, DIGEST), f"ghcr.io/a/b@{DIGEST}"),
        (f"ghcr.io/a/b:1@{DIGEST}", Reference("ghcr.io", "a/b", "1", DIGEST), f"ghcr.io/a/b:1@{DIGEST}"),
    ],
)  # fmt: skip
def test_a_reference_is_spelled_out(text: str, expected: Reference, whole: str) -> None:
    found = parse_reference(text)
    assert found == expected
    assert str(found) == whole
    assert parse_reference(whole) == found
    assert found.selector == (found.digest or found.tag)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("docker://", "is empty"),
        ("a b", "contains a space"),
        ("a/b\n", "contains a space or another character"),
        ("größe", "contains a space or another character"),
        ("nvcr.io/NVIDIA/pytorch", "has capital letters in its name\n  -> write 'nvidia/pytorch'"),
        ("nvcr.io/", "has the invalid name ''"),
        ("a//b", "has the invalid name"),
        ("-a", "has the invalid name"),
        ("a..b", "has the invalid name"),
        ("a:", "has the invalid tag ''"),
        ("a:b:c", "has the invalid tag 'b:c'"),
        ("a:" + "t" * 129, "\n  -> a tag is 1 to 128"),
        ("host:0/a", "has the invalid registry 'host:0' (it must be HOST"),
        ("host:99999/a", "has the invalid registry 'host:99999'"),
        ("ho_st.org/a", "has the invalid registry 'ho_st.org'"),
        ("a@", "has an invalid digest"),
        (f"a@{DIGEST[:-1]}", "has an invalid digest"),
        (f"a@{DIGEST.upper()}", "has a digest of type 'SHA256'"),
        ("a@sha512:" + "0" * 128, "has a digest of type 'sha512'; only sha256"),
        ("/".join(["abcdefgh"] * 30), "longer than 255"),
    ],
)
def test_what_is_no_reference(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_reference(text)
    assert message in str(error.value)


_NAMES = st.from_regex(r"[a-z0-9]+(?:[._-][a-z0-9]+){0,2}(?:/[a-z0-9]+){0,3}", fullmatch=True).filter(
    lambda name: len(name) < 200
)
_TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@settings(max_examples=30)
@given(st.sampled_from(["docker.io", "nvcr.io", "localhost", "h:5000"]), _NAMES, st.none() | _TAGS, st.booleans())
def test_what_was_spelled_out_is_read_back(registry: str, name: str, tag: str | None, digest: bool) -> None:
    text = f"{registry}/{name}" + (f":{tag}" if tag else "") + (f"@{DIGEST}" if digest else "")
    found = parse_reference(text)
    assert parse_reference(str(found)) == found
    assert found.registry == registry
    assert found.name.removeprefix("library/") == name.removeprefix("library/")


@settings(max_examples=80)
@given(st.text(max_size=40) | st.text(alphabet="abA:/@.-_[]0 ", max_size=40))
@example("A/0")  # in lower case, the registry A would be a name on Docker Hub
def test_any_text_is_a_reference_or_a_users_mistake(text: str) -> None:
    try:
        found = parse_reference(text)
    except UserError:
        return
    assert parse_reference(str(found)) == found
