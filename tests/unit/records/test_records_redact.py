"""What is taken out of the logs, causes and records of others before they are shown: secrets of every kind, no more."""

from __future__ import annotations

import base64
import re
import runpy
import time
from typing import Any

import pytest

from slurmddp import records
from slurmddp.records.redact import redact

#: Random characters: of a value as machines make it.
V = "a8Kd03jFq7ZxW2mB9sLt5VnRyC4eHuPg6oTi1wQvXbN0zM3c"
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
GUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
BASIC = base64.b64encode(b"alice:correct-horse").decode()
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{V[:43]}"
KEY = "\n".join(("MIIEpAIBAAKCAQEAx7Qw3Zr9Tn5Lb2Vy8Kc4Hd6Jf1Gs0Pm" + V)[index % 7 :][:64] for index in range(25))
LOGGED_KEY = KEY.replace("\n", "\nnode1 [rank0]: ")
#: Text of a log, `%s` where the secret is; what it is.
SECRETS: tuple[tuple[str, str], ...] = (
    ("credentials: %s is used", "AKIA" + "Q7ZXW2MB4SLT5VNR"),
    ("AWS_SECRET_ACCESS_KEY=%s", V[:40]),
    ("aws_secret_access_key = %s", "/" + V[:39]),
    ("aws_session_token = %s", "IQoJb3JpZ2luX2VjE" + V),
    ("export AWS_SESSION_TOKEN='%s'", "FwoGZXIvYXdzE" + V),
    ("remote: ghp_%s", V[:36]),
    ("git clone https://gho_%s@github.com/a/b", V[:36]),
    ("github_pat_%s", "11ABCDEFG0" + V),
    ("glpat-%s", V[:20]),
    ("login with hf_%s", V[:34]),
    ("wandb login %s", HEX[:40]),
    ("wandb login --relogin --host https://wandb.org %s", HEX[:40]),
    ('"WANDB_API_KEY": "%s",', HEX[:40]),
    ("openai.api_key = 'sk-proj-%s'", V),
    ("client sk-ant-api03-%s failed", V),
    ("Incorrect API key provided: sk-%s.", V),
    ("xoxb-%s", "2345678901-" + V[:24]),
    ("SLACK=xapp-%s", "1-A02-345-" + V),
    ("curl https://hooks.slack.com/services/T0AB12CD/B0CD34EF/%s", V[:24]),
    ("https://hooks.slack.com/workflows/T0AB12CD/A0CD34EF/%s", "4567/" + V[:24]),
    ("https://discord.com/api/webhooks/123456789012345678/%s", V + V[:20]),
    (f"https://org.webhook.office.com/webhookb2/{GUID}@{GUID}/IncomingWebhook/%s/{GUID}", HEX[:32]),
    ("https://p-1.westeurope.logic.azure.com:443/workflows/ab/triggers/manual?api-version=1&sig=%s", V[:43]),
    ("https://chat.googleapis.com/v1/spaces/AAAA/messages?key=A&token=%s", V[:30]),
    ("https://mattermost.uni.edu/hooks/%s", "x3k9m2p7q8w5r1t6y4u0i8o2a7"),
    ("https://api.telegram.org/bot%s/sendMessage", "5123456789:AA" + V[:33]),
    ("psql postgres://alice:%s@db.uni.edu:5432/runs", "correcthorse"),
    ("redis://:%s@cache:6379/0", "correcthorse"),
    ("HTTPS_PROXY=http://alice:%s@proxy.uni.edu:3128", "p@ss"),
    ("> Authorization: Bearer %s", V),
    ("'authorization': 'Basic %s'", BASIC),
    ("Proxy-Authorization: Basic %s", BASIC),
    ("Authorization: AWS4-HMAC-SHA256 Credential=X/2026/s3, Signature=%s", HEX),
    ("curl -H 'X-API-Key: %s' https://host", V[:30]),
    ("PRIVATE-TOKEN: %s", V[:20]),
    ("Set-Cookie: session=%s; Path=/", V[:32]),
    ("curl -fsS -u alice:%s https://host/x", "correcthorse"),
    ("-----BEGIN RSA PRIVATE KEY-----\n%s\n-----END RSA PRIVATE KEY-----", KEY),
    ("[rank0]: -----BEGIN OPENSSH PRIVATE KEY-----\n%s\nnode1 [rank0]: -----END OPENSSH PRIVATE KEY-----", LOGGED_KEY),
    (r'"private_key": "-----BEGIN PRIVATE KEY-----\n%s\n-----END PRIVATE KEY-----\n",', KEY.replace("\n", r"\n")),
    ("first line\nmachine api.wandb.ai login user password %s", HEX[:40]),
    ("machine github.com\n  login alice\n  password %s", "correcthorse"),
    ('{"host": "db", "password": "%s"}', "correct horse battery"),
    ("{'client_secret': '%s'}", V[:30]),
    ("Config(lr=0.1, api_key='%s', steps=3)", V[:30]),
    ("Namespace(hf_token='%s', lr=0.1)", "correcthorse"),
    ("users:\n- name: alice\n  user:\n    client-key-data: %s", base64.b64encode(KEY.encode()).decode()),
    ("users:\n- user:\n    token: %s", V),
    ('{"auths": {"nvcr.io": {"auth": "%s"}}}', base64.b64encode(b"$oauthtoken:" + V.encode()).decode()),
    ("export MY_TOKEN=%s", "correcthorse"),
    ('declare -x DB_PASSWORD="%s"', "correct horse"),
    ("+ setenv HF_TOKEN %s", "correcthorse"),
    ("HF_TOKEN             %s", V[:34]),
    ("os.environ['HF_TOKEN'] = '%s'", "correcthorse"),
    ("train.py --api-key %s --lr 3", "correcthorse"),
    ("train.py --api-key=%s", "correcthorse"),
    ("train.py --password '%s' --lr 3", "correct horse battery"),
    ("['train.py', '--auth-token', '%s']", "correcthorse"),
    ("+logger.wandb.api_key=%s", HEX[:40]),
    ("https://acc.blob.core.windows.net/c/f?sv=2022-11-02&ss=b&sig=%s&se=2026", V[:43] + "%3D"),
    ("https://b.s3.amazonaws.com/k?X-Amz-Date=2026&X-Amz-Signature=%s", HEX),
    ("GET /v1/x?access_token=%s HTTP/1.1", V[:30]),
    ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=%s;EndpointSuffix=c", V + V[:40]),
    ("Endpoint=sb://x.net/;SharedAccessKeyName=Root;SharedAccessKey=%s", V[:43] + "="),
    ("DB_PASS=%s", "hunter2hunter2"),
    ("MYSQL_PWD=%s", "hunter2hunter2"),
    ("SSH_PASSPHRASE=%s", "hunter2hunter2"),
    ("sshpass -p %s ssh host", "correcthorse"),
    ("mysqldump -u root -p%s runs", "correcthorse"),
    ("docker login -u alice -p %s nvcr.io", "correcthorse"),
    ("echo %s | apptainer registry login --password-stdin", "correcthorse"),
    ("session %s", JWT),
    ("key=AIza%s", V[:35]),
    ("refreshed ya29.%s", V),
    ("//registry.npmjs.org/:_authToken=npm_%s", V[:36]),
    ("uploading with pypi-AgEIcHlwa%s", V),
    ("SG.%s", V[:22] + "." + V[:43]),
    ("stripe sk_live_%s", V[:24]),
    ("hvs.%s", V),
    ("NGC nvapi-%s", V + V[:16]),
    ("https://conda.anaconda.org/t/%s/org/linux-64", "ab-" + GUID),
    ("AGE-SECRET-KEY-1%s", "Q7ZXW2MB4SLT5VNR" * 4),
    ("COMET_API_KEY: %s", V[:25]),
    ("KAGGLE_KEY=%s", HEX[:32]),
    ("<password>%s</password>", "correcthorse"),
)
INNOCENT = (
    "commit 3eb2cac9d1f0a7b6c5e4d3c2b1a09f8e7d6c5b4a",
    f"sha256:{HEX}  images/pytorch.sif",
    "d41d8cd98f00b204e9800998ecf8427e  data/train.bin",
    f"MIG-{GUID} GPU-{GUID} run_uuid={GUID}",
    "run gpt-books-20261127-120305-k3x9 on node[1-4,7], job 48121_3",
    "/home/alice/.cache/huggingface/token: no such file",
    '  File "/home/alice/train.py", line 12, in <module>',
    "step 300 loss=2.5 tokens: 512 tokens_per_second: 1.2e5 token=50256",
    "main.py --max-tokens 128 --tokenizer gpt2 --eos-token </s> --pass 2 --key value",
    "eos_token=</s> pad_token=<pad> special_tokens={'bos_token': '<s>'}",
    "NCCL INFO Channel 00/02 : 0 1 2 3 [send] via NET/IB/0/GDRDMA commId 0x5a1f3c9d2e",
    "KeyError: 'password'",
    "HF_TOKEN is not set; WANDB_API_KEY: not set",
    "api_key=None, password=None, token=True, use_auth_token=False",
    "    model = load(name, token=os.environ['HF_TOKEN'], api_key=args.api_key)",
    "    def __init__(self, token: str, lr: float = 0.1) -> None:",
    "export HF_TOKEN=$HF_TOKEN WANDB_API_KEY=$(cat ~/.wandb)",
    "https://huggingface.co/datasets/a/b/resolve/main/x-00001.parquet?download=true",
    f"docker://nvcr.io/nvidia/pytorch:25.04-py3@sha256:{HEX}",
    "View run at https://wandb.ai/team/project/runs/3x9k2l1m",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHd6Jf1Gs0Pm9Tn5Lb2Vy8Kc4 alice@login1",
    "SLURM_JOB_ID=7 SLURM_NODELIST=node[1-4] SLURM_JWT_TIMEOUT=60",
    "PATH=/usr/local/bin:/usr/bin PWD=/home/alice OLDPWD=/scratch/alice/run-1",
    "git@github.com:org/repo.git tcp://10.0.0.1:29500 http://node1:29500/?key=layer.0",
    "TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "query: torch.Size([8, 4]) key: torch.Size([8, 4]) value: torch.Size([8, 4])",
    "Authorization failed for alice; the bearer channel is closed",
    "checkpoint step-00001200/shard-3-of-8.pt saved in 3.2 s, 1234567890123456 bytes",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB",
    "pip install scikit-learn risk-assessment-of-a-very-long-name-with-many-words-in-it==1.2",
    "python -u train.py:main; sort -u a:b; ssh -p 22 node1; mkdir -p runs/gpt-1",
    "forward_pass: compiled; signature=(int, str); author: alice; monkey: bananas1; 3 passed: 12",
    "  | Name | Type | Params | key_padding_mask | cache_key=9f86d081884c7d65 |",
    "secretariat of the ICLR, token ring, password-less login to node1 works",
)


@pytest.mark.parametrize(("text", "value"), SECRETS)
def test_no_kind_of_secret_is_left(text: str, value: str) -> None:
    shown = redact(f"before 1\n{text.replace('%s', value, 1)}\nafter 2\n")
    lines = value.replace("\\n", "\n").replace("node1 [rank0]: ", "").split("\n")
    assert not [line for line in lines if line in shown] and "[redacted" in shown
    assert shown.startswith("before 1\n") and shown.endswith("after 2\n")


@pytest.mark.parametrize("line", INNOCENT)
def test_what_is_no_secret_stays_readable(line: str) -> None:
    assert redact(f"{line}\n") == f"{line}\n"


def test_known_values_are_hidden_wherever_they_stand() -> None:
    assert redact("boom at open sesame!", ["open sesame"]) == "boom at [redacted]!"


@pytest.mark.parametrize("line", ["a1" * 200_000, "a=" * 3000, "QUJD" * 80_000, "\ud800 token=abcdefgh", "a:b@" * 2000])
def test_odd_lines_of_a_log_take_no_time(line: str) -> None:
    began = time.process_time()
    text = redact(f"first\n{line}\nHF_TOKEN=abcdefgh12\n")
    assert time.process_time() - began < 10 and "abcdefgh" not in text and text.startswith("first\n")


def test_the_pattern_of_a_kind_is_compiled_once_a_text_has_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, real = [], re.compile

    def noted(source: Any, *flags: Any) -> re.Pattern[Any]:
        compiled.append(source)
        return real(source, *flags)

    monkeypatch.setattr(re, "compile", noted)
    loaded = runpy.run_path(f"{records.__path__[0]}/redact.py")
    sources = {kind.source: kind.hints for kind in loaded["KINDS"]}
    assert sources and not sources.keys() & {*compiled}
    loaded["without_kinds"]("see glpat-")
    assert {hint for source in compiled if source in sources for hint in sources[source]} == {b"", b"glpat-"}
