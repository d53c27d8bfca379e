"""What looks like a secret in a job is refused with advice, and what only sounds like one is not."""

import pytest

from slurmddp.errors import UserError
from slurmddp.job.sensitive import redacted, refuse_secrets
from slurmddp.records.redact import REDACTED, is_secret_name
from tests.helpers import Desk, refusal, yaml_of

VALUE = "sk-0123456789abcdef"
SCRIPT = "name: gpt\nsite: here\ntrain: {script: train.py}\n"

SECRET = (
    "HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY", "hf_token", "TOKEN",
    "--hf-token", "--api-key", "--apiKey", "--wandb_api_key", "--password", "logger.wandb.api_key", "OPENAI_APIKEY",
)  # fmt: skip
HARMLESS = (
    "TOKENIZERS_PARALLELISM", "--max-tokens", "--tokenizer", "--max_new_tokens", "--token-dropout", "--num-tokens",
    "--pad-token", "--eos_token", "--bos-token", "--unk-token", "--mask-token", "--image-token", "--cost-per-token",
    "--tokens", "--keyboard", "--key", "TOKEN_COUNT", "SECRET_SANTA", "--password-field", "--secretary",
    "AWS_ACCESS_KEY_ID", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH", "--token-file", "PRIMARY_KEY",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_only_sound_like_one(desk: Desk, name: str) -> None:
    assert not is_secret_name(name)
    args = [name, VALUE] if name.startswith("-") else [f"{name}={VALUE}"]
    refuse_secrets(desk.resolve(f"name: gpt\nsite: here\ntrain: {{script: train.py, args: {yaml_of(args)}}}\n"))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        (f"environment: {{HF_TOKEN: {VALUE}}}\n", "environment.HF_TOKEN: HF_TOKEN looks"),
        (f"network: {{variables: {{MY_SECRET: {VALUE}}}}}\n", "network.variables.MY_SECRET: MY_SECRET looks"),
        (f"setup: ['module load x; export WANDB_API_KEY={VALUE}']\n", "setup.0: WANDB_API_KEY looks"),
        (f"setup: ['export HF_TOKEN=\"{VALUE}\"']\n", "setup.0: HF_TOKEN looks"),
        (f"container: {{options: ['--env=A=b,HF_TOKEN={VALUE}']}}\n", "container.options.0: HF_TOKEN looks"),
    ],
)
def test_a_secret_in_a_job_file_is_refused_with_its_line_and_not_shown(desk: Desk, job: str, name: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_secrets(desk.resolve(SCRIPT + job))
    shown = refusal(caught.value)
    assert f"job.yaml:4: {name} like a secret" in shown and "environment_from: [" in shown and VALUE not in shown


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--hf-token", VALUE], "--hf-token"),
        (["--lr", "1", f"--api-key={VALUE}"], "--api-key"),
        ([f"+logger.wandb.api_key={VALUE}"], "+logger.wandb.api_key"),
        (['{"hub": {"hf_token": "' + VALUE + '"}}'], "hf_token"),
    ],
)
def test_a_secret_among_the_arguments(desk: Desk, args: list[str], shown: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_secrets(desk.resolve(f"name: gpt\nsite: here\ntrain: {{script: train.py, args: {yaml_of(args)}}}\n"))
    text = refusal(caught.value)
    assert f"train.args: {shown} looks like a secret" in text and VALUE not in text and "environment_from" in text


def test_a_secret_among_a_task_s_options(desk: Desk) -> None:
    job = f"name: gpt\nsite: here\ntrain: {{task: 'my.tasks:make', data: {{hub: {{hf_token: {VALUE}}}}}}}\n"
    with pytest.raises(UserError, match=r"train.data: hf_token looks like a secret"):
        refuse_secrets(desk.resolve(job))


def test_every_layer_is_looked_at(desk: Desk) -> None:
    with pytest.raises(UserError, match=r"--set environment\.HF_TOKEN"):
        refuse_secrets(desk.resolve(SCRIPT, f"environment.HF_TOKEN={VALUE}"))
    with pytest.raises(UserError, match=r"\$SLURMDDP_ENVIRONMENT__HF_TOKEN"):
        refuse_secrets(desk.resolve(SCRIPT, SLURMDDP_ENVIRONMENT__HF_TOKEN=VALUE))


@pytest.mark.parametrize(
    "job",
    [
        "environment: {USE_AUTH_TOKEN: 'true', HF_TOKEN: ''}\n",
        "setup: ['export HF_TOKEN=$(cat ~/.token)', 'export A_TOKEN=\"$B\"']\n",
        "environment: {BLANK_TOKEN: blank}\nnot_secret: [BLANK_TOKEN]\n",
        "environment_from: [HF_TOKEN, WANDB_API_KEY]\n",
    ],
)
def test_what_holds_no_secret_passes(desk: Desk, job: str) -> None:
    refuse_secrets(desk.resolve(SCRIPT + job))


def test_a_flag_without_a_value_passes_and_an_exception_is_by_name(desk: Desk) -> None:
    job = "name: gpt\nsite: here\ntrain: {script: train.py, args: ['--use-auth-token', '--lr', '1']}\n"
    refuse_secrets(desk.resolve(job))
    job = "name: gpt\nsite: here\nnot_secret: [--vocab-token]\ntrain: {script: train.py, args: [%s, x]}\n"
    refuse_secrets(desk.resolve(job % "--vocab-token"))
    with pytest.raises(UserError, match="--hf-token"):
        refuse_secrets(desk.resolve(job % "--hf-token"))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("environment_from: [RANK]\n", "sets RANK"),
        ("environment_from: [SLURMDDP_RUN]\n", "sets SLURMDDP_RUN"),
        ("environment_from: [A B]\n", "must be letters"),
        ("environment_from: [A]\nenvironment: {A: b}\n", "environment and environment_from both set A"),
        ("paths: {mode: '0777'}\n", "paths.mode: must be one of '0700', '0750' or '0755'"),
    ],
)
def test_mistakes(desk: Desk, job: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(SCRIPT + job)
    assert message in refusal(caught.value)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["submit", "job.yaml", "--set", f"environment.HF_TOKEN={VALUE}"], ["environment.HF_TOKEN=" + REDACTED]),
        (["submit", f"--set=environment.HF_TOKEN={VALUE}"], [f"--set=environment.HF_TOKEN={REDACTED}"]),
        (["t.py", "--", "--hf-token", VALUE, "--lr", "1"], ["--hf-token", REDACTED, "--lr", "1"]),
        (["t.py", "--", f"--api-key={VALUE}"], [f"--api-key={REDACTED}"]),
        (["--set", f"environment={{A: b, HF_TOKEN: {VALUE}}}"], [f"environment={{A: b, HF_TOKEN: {REDACTED}}}"]),
        (["--url", f"https://me:{VALUE}@host/x"], [f"https://{REDACTED}@host/x"]),
        (["--anything", f"x{VALUE}y"], [f"x{REDACTED}y"]),
        (["--max-tokens", "128", "--eos-token", "</s>"], ["--max-tokens", "128", "--eos-token", "</s>"]),
    ],
)
def test_a_recorded_command_line(words: list[str], kept: list[str]) -> None:
    found = redacted(words, [VALUE] if words[0] == "--anything" else [])
    assert found[-len(kept) :] == kept and VALUE not in " ".join(found) and len(found) == len(words)
