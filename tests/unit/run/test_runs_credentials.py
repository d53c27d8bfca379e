"""Files with credentials that researchers have in a project or a home folder, and harmless ones that look like them.

The values are drawn at random here: no text in this file is a key of anybody's.
"""

import random
import string
from pathlib import Path

import pytest

from slurmddp.run import credentials
from slurmddp.run.credentials import credentials_in, named_as_credential

_RANDOM = random.Random(27)
_LETTERS = string.ascii_letters + string.digits


def r(count: int, letters: str = _LETTERS) -> str:
    """Return a random value. It has digits, as almost all real ones of this length have."""
    return "".join(_RANDOM.choices(letters, k=count - 4)) + "7392"[: min(4, count)]


def h(count: int) -> str:
    return r(count, "0123456789abcdef")


def pem(kind: str, lines: int = 6) -> str:
    body = "\n".join(r(64) for _ in range(lines))
    return f"-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\n"


JWT = f"eyJhbGciOi{r(12)}.eyJzdWIiOi{r(40)}.{r(43)}"
KUBE = "kind: Config\nclusters:\n- cluster: {server: https://k:6443}\n  name: k\nusers:\n- name: me\n  user:\n"
GCP = '{"type": "service_account", "project_id": "p", "private_key_id": "%s", "private_key": "%s"}'

#: Credentials by their names alone, and names that only look like it.
_NAMED = (
    ".env .config/slurmddp/secrets/chat .ssh/config .aws/config .gnupg/pubring.kbx .azure/msal_token_cache.bin "
    ".netrc .pgpass .my.cnf .bash_history .zsh_history .python_history .vault-token .s3cfg "
    ".kaggle/kaggle.json .config/gh/hosts.yml .docker/config.json .config/rclone/rclone.conf me.p12 "
    "hf_token wandb_api_key.txt .cache.kdbx .smbcredentials .passwd-s3fs .Xauthority putty.ppk "
    ".config/gcloud/credentials.db .cargo/credentials.toml .git-credentials id_dsa"
)
_LIKE_NAMED = (
    "secrets/chat .config/slurmddp/sites/secrets .env.example id_rsa.pub authorized_keys tokenizer.json tokens.txt "
    "tokenizer_config.json special_tokens_map.json added_tokens.json token.py tokenization.py key.py "
    "keys.json secrets.py credentials.py password.py config.json auth.py history.json kube/config.yaml "
    "gh/README.md docker/config.yml aws/main.tf netrc.py test_netrc.py vault.py public.asc.md ssh.md "
    "docs/api_keys.md tests/test_tokens.py data/tokens.bin training_history.csv"
)

#: Path -> content. 100 files.
CREDENTIALS: dict[str, str] = {
    # by their name alone
    **dict.fromkeys(
        _NAMED.split(),
        "x\n",
    ),
    # keys under other names
    "deploy_rsa": pem("RSA PRIVATE KEY"),
    "cluster-access": pem("OPENSSH PRIVATE KEY", 5),
    "my_server": pem("EC PRIVATE KEY", 2),
    "keys/ed25519.txt": pem("PRIVATE KEY", 1),
    "keys/locked": pem("ENCRYPTED PRIVATE KEY"),
    "backup.asc": pem("PGP PRIVATE KEY BLOCK", 20),
    "old.bak": pem("RSA PRIVATE KEY").replace("Y-----\n", f"Y-----\nDEK-Info: AES-128-CBC,{h(32)}\n\n", 1),
    "windows-key.txt": f"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPrivate-Lines: 1\n{r(48)}\n",
    "sops/keys.txt": f"# created: 2025\nAGE-SECRET-KEY-1{r(58, string.ascii_uppercase + string.digits)}\n",
    "wg0.conf": f"[Interface]\nPrivateKey = {r(43)}=\nAddress = 10.0.0.2/24\n",
    "vpn/uni.ovpn": f"client\nremote vpn 1194\n<key>\n{pem('PRIVATE KEY')}</key>\n",
    "connect.py": f'KEY = """{pem("RSA PRIVATE KEY")}"""\n',
    # cloud and cluster logins
    "service-account.json": GCP % (h(40), pem("PRIVATE KEY").replace("\n", "\\n")),
    "gcp/my-project-1234.json": GCP % (h(40), pem("PRIVATE KEY").replace("\n", "\\n")),
    "adc.json": f'{{"client_id": "1.apps", "refresh_token": "1//0g{r(60)}", "type": "authorized_user"}}',
    "cluster.yaml": f"{KUBE}    client-key-data: {r(200)}=\n",
    "k8s/admin.conf": f"{KUBE}    token: {JWT}\n",
    "aws.ini": f"[default]\naws_access_key_id = AKIA{r(16, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567').replace('9', 'Q')}\n",
    "s3.cfg": f"[default]\naws_secret_access_key = {r(40)}\n",
    ".dvc/config.local": f"['remote \"s\"']\n    secret_access_key = {r(40)}\n",
    "minio.json": f'{{"url": "https://s3", "accessKey": "me", "secretKey": "{r(40)}"}}',
    "azure.txt": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={r(86)}==;EndpointSuffix=core\n",
    "docker-config.json": f'{{"auths": {{"nvcr.io": {{"auth": "JG9hdXRo{r(60)}"}}}}}}',
    ".apptainer/docker-config.json": f'{{"auths": {{"ghcr.io": {{"auth": "{r(40)}="}}}}}}',
    "podman-auth.json": f'{{\n  "auths": {{\n    "quay.io": {{\n      "auth": "{r(44)}"\n    }}\n  }}\n}}\n',
    ".apptainer/remote.yaml": f"Remotes:\n  SylabsCloud:\n    Token: {JWT}\n",
    "terraform.tfvars": f'do_token = "dop_v1_{h(64)}"\n',
    "openrc.sh": f'export OS_USERNAME=me\nexport OS_PASSWORD="{r(24)}"\n',
    "databricks.cfg": f"[DEFAULT]\nhost = https://x\ntoken = dapi{h(32)}\n",
    # tokens of services
    "kaggle.json": f'{{"username":"me","key":"{h(32)}"}}',
    "gh.yml": f"github.com:\n    oauth_token: gho_{r(36)}\n    user: me\n",
    "notes.md": f"push with ghp_{r(36)}\n",
    "clone.sh": f"git clone https://ghp_{r(36)}@github.com/me/x\n",
    "pat.txt": f"github_pat_{r(22)}_{r(59)}\n",
    "ci.yaml": f"variables:\n  T: glpat-{r(20)}\n",
    "download.py": f'from huggingface_hub import login\nlogin("hf_{r(34)}")\n',
    "eval.ipynb": f'{{"cells": [{{"source": ["os.environ[\\"HF_TOKEN\\"] = \\"hf_{r(34)}\\""]}}]}}',
    "openai.sh": f"export OPENAI_API_KEY=sk-proj-{r(48)}\n",
    "llm.yaml": f"model: x\napi_key: sk-ant-api03-{r(90)}\n",
    "judge.json": f'{{"key": "sk-{r(48)}"}}',
    "wandb.sh": f"export WANDB_API_KEY={h(40)}\n",
    "wandb/settings": f"[default]\nentity = me\napi_key = {h(40)}\n",
    "run.sbatch": f"#!/bin/bash\n#SBATCH -N 2\nexport WANDB_API_KEY='{h(40)}'\nsrun python train.py\n",
    "logins": f"machine api.wandb.ai\n  login user\n  password {h(40)}\n",
    "comet.config": f"[comet]\napi_key={r(25)}\n",
    ".clearml.conf": f'api {{\n  credentials {{ "access_key" = "{r(20)}", "secret_key" = "{r(50)}" }}\n}}\n',
    "neptune.py": f'run = neptune.init_run(project="me/x", api_token="{r(120)}==")\n',
    "notify.py": f'URL = "https://hooks.slack.com/services/T{r(8)}/B{r(8)}/{r(24)}"\n',
    "bot.py": f'client = WebClient("xoxb-{r(12, string.digits)}-{r(24)}")\n',
    "alerts.json": f'{{"url": "https://discord.com/api/webhooks/{r(18, string.digits)}/{r(68)}"}}',
    "pypi.toml": f'token = "pypi-AgEIcHlwaS5vcmc{r(100)}"\n',
    "publish.cfg": "[distutils]\nindex-servers = pypi\n[pypi]\nusername = me\npassword = Tr0ub4dor&3\n",
    "npmrc.bak": f"//registry.npmjs.org/:_authToken=npm_{r(36)}\n",
    "yarn.yml": f'npmAuthToken: "{r(40)}"\n',
    "maps.js": f'const k = "AIza{r(35)}";\n',
    "ngc.sh": f"export NGC_API_KEY=nvapi-{r(64)}\n",
    "login.sh": f"docker login -u me -p dckr_pat_{r(27)}\n",
    "groq.py": f'client = Groq(api_key="gsk_{r(52)}")\n',
    ".condarc": f"channels:\n  - https://conda.anaconda.org/t/me-{h(8)}-{h(4)}-{h(4)}-{h(4)}-{h(12)}/me\n",
    "pip.conf": f"[global]\nextra-index-url = https://me:{r(20)}@pypi.lab.org/simple\n",
    "optuna.py": f'study = optuna.create_study(storage="postgresql://me:{r(12)}@db.lab.org/optuna")\n',
    "pgpass.conf": "db.lab.org:5432:results:me:correcthorse7\n",
    "mysql.cnf": "[client]\nuser=me\npassword=correcthorse7\n",
    "settings.xml": "<servers><server><username>me</username><password>correcthorse7</password></server></servers>\n",
    "cdsapi.txt": f"url: https://cds/api\nkey: {h(8)}-{h(4)}-{h(4)}-{h(4)}-{h(12)}\n",
    "ecmwf.json": f'{{"url": "https://api", "key": "{h(32)}", "email": "me@lab.org"}}',
    "remote.conf": f'[drive]\ntype = drive\nscope = drive\ntoken = {{"access_token":"ya29.{r(60)}"}}\n',
    "cookies.txt": f"# Netscape HTTP Cookie File\n.lab.org\tTRUE\t/\tTRUE\t0\tsession\t{r(30)}\n",
    "secrets.toml": f'[db]\npassword = "{r(24)}"\n',
    "modal.toml": f'[me]\ntoken_id = "ak-{r(22)}"\ntoken_secret = "as-{r(22)}"\n',
}

FAKE_PEM = "-----BEGIN PRIVATE KEY-----\nMIIfake\n-----END PRIVATE KEY-----\n"
#: 100 files that look like them and are none.
HARMLESS: dict[str, str] = {
    # names of real projects
    **dict.fromkeys(
        _LIKE_NAMED.split(),
        "x = 1\n",
    ),
    # keys that are none
    "test_pem.py": f'PEM = "{FAKE_PEM}"\n',
    "conftest.py": f'KEY = """{FAKE_PEM}"""\n',
    "tls.md": "Begin with `-----BEGIN PRIVATE KEY-----`, then the key, then `-----END PRIVATE KEY-----`.\n",
    "detect.py": 'RULE = r"-----BEGIN (RSA|EC) PRIVATE KEY-----"\n',
    "ca.crt": pem("CERTIFICATE"),
    "signer.txt": pem("PUBLIC KEY"),
    "csr.txt": pem("CERTIFICATE REQUEST"),
    "pgp.txt": pem("PGP PUBLIC KEY BLOCK"),
    "putty.md": "A PuTTY key begins with `PuTTY-User-Key-File-3: ssh-ed25519`.\n",
    "wg.md": "[Interface]\nPrivateKey = <your private key>\n",
    "sa-template.json": GCP % ("KEY_ID", "-----BEGIN PRIVATE KEY-----\\n...\\n-----END PRIVATE KEY-----\\n"),
    "sa-schema.json": '{"properties": {"type": {"enum": ["service_account"]}, "private_key": {"type": "string"}}}',
    "kube-exec.yaml": f"{KUBE}    exec: {{command: gke-gcloud-auth-plugin}}\n",
    "deployment.yaml": "apiVersion: v1\nkind: Secret\ndata:\n  token: ${TOKEN}\n",
    "kube.md": f"{KUBE}    token: <paste-your-token-here>\n",
    "docker-empty.json": '{"auths": {}, "credsStore": "desktop"}',
    "docker-helper.json": '{"auths": {"nvcr.io": {}}, "credHelpers": {"ghcr.io": "gh"}}',
    "docker-docs.md": '`{"auths": {"nvcr.io": {"auth": "<base64 of user:password>"}}}`\n',
    # placeholders
    "README.md": "export GITHUB_TOKEN=ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n",
    "install.md": "export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n",
    "openai.md": "export OPENAI_API_KEY=sk-your-key-goes-here-0000000000000000000\n",
    "aws.md": "id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\n",
    "slack.md": "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX\n",
    "slack.py": 'TOKEN = "xoxb-your-bot-token-goes-here-123456"\n',
    "wandb.md": "wandb login YOUR_API_KEY\nexport WANDB_API_KEY=<your 40 characters>\n",
    "kaggle.md": '`{"username":"me","key":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}`\n',
    "gitlab.md": "curl --header 'PRIVATE-TOKEN: glpat-xxxxxxxxxxxxxxxxxxxx'\n",
    "ci.yml": "env:\n  HF_TOKEN: ${{ secrets.HF_TOKEN }}\n  WANDB_API_KEY: ${{ secrets.WANDB_API_KEY }}\n",
    "compose.yaml": "environment:\n  POSTGRES_PASSWORD: ${POSTGRES_PASSWORD}\n  URL: postgres://user:password@db/x\n",
    "db.md": "postgresql://user:yourpassword@localhost:5432/db\n",
    "proxy.sh": "export https_proxy=http://$USER:$PASS@proxy:8080\n",
    "clone.md": "git clone https://oauth2:${TOKEN}@gitlab.com/x\n",
    "pypirc.md": "[pypi]\nusername = __token__\npassword = <your token>\n",
    "maven.xml": "<server><password>${env.MAVEN_PASSWORD}</password></server>\n",
    "rclone.md": "[drive]\ntype = drive\ntoken = <see rclone config>\n",
    "netrc.md": "machine api.wandb.ai\n  login user\n  password KEY\n",
    # code
    "login.py": 'import os\ntoken = os.environ["HF_TOKEN"]\napi_key = os.environ.get("WANDB_API_KEY", "")\n',
    "args.py": 'parser.add_argument("--api-key", default=None)\nparser.add_argument("--password", required=True)\n',
    "page.py": "next_token = response.get('NextToken')\npage_token = state.tokens[step_2048_16_8]\n",
    "mask.py": "SECRET = re.compile('ghp_[A-Za-z0-9]{36}|hf_[A-Za-z0-9]{34}|AKIA[A-Z0-9]{16}')\n",
    "hash.py": f'EXPECTED_SHA = "{h(64)}"\nassert digest == "{h(40)}"\n',
    "checkpoint.py": f'REVISION = "{h(40)}"\nmodel = load("org/model", revision=REVISION)\n',
    "machine.txt": "machine learning is not a password\n" * 50,
    "getpass.py": 'password = getpass.getpass("password: ")\nsecret = Secret.from_file(path_2024_01_02_03)\n',
    "hidden.sh": 'export WANDB_API_KEY="$(cat ~/.wandb_key)"\nexport HF_TOKEN=$(<~/.cache/huggingface/token)\n',
    "sk.py": "from sklearn.linear_model import SGDClassifier\nname = 'task-sk-learn-pipeline'\n",
    "class.css": ".sk-fading-circle-container-with-twelve-dots-1 { width: 40px }\n",
    "risk.md": "The risk-adjusted-return-of-the-portfolio-in-2024 is not disk-usage-by-folder-of-the-cluster.\n",
    # tokenizers, configurations, data
    "config.yaml": 'tokenizer: gpt2\npad_token: "<|endoftext|>"\neos_token_id: 50256\nmax_tokens: 4096\n',
    "tok/tokenizer_config.json": '{"bos_token": "<s>", "image_token": "<image_placeholder_0001>"}',
    "tok/vocab.json": '{"ghp_": 1, "hf_": 2, "token": 3, "secret": 4, "AKIA": 5, "password": 123456789012}',
    "tok/merges.txt": "#version: 0.2\nt o\nto k\ntok en\nh f_\nsk -\n",
    "data.jsonl": '{"text": "my password is swordfish", "label": 1}\n{"text": "the secret: 12 tokens", "label": 0}\n',
    "prompts.txt": "Never reveal the API key. token: none. password: hunter2\n",
    "plot.ipynb": f'{{"cells": [{{"outputs": [{{"image/png": "{r(8000, _LETTERS + "+/")}"}}]}}]}}',
    "ds.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "secret": null, "token": ""}',
    "package-lock.json": f'{{"packages": {{"x": {{"integrity": "sha512-{r(86)}=="}}}}}}',
    "poetry.lock": f'[[package]]\nname = "x"\nfiles = [{{file = "x.whl", hash = "sha256:{h(64)}"}}]\n',
    "environment.yml": f"dependencies:\n  - pip:\n    - git+https://github.com/me/x@{h(40)}\n",
    "known.txt": f"node1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5{r(48)}\n",
    "log.txt": f"step 1 tokens 4096 loss 3.2\nuser:1000:1000::/home/me:/bin/bash\nuuid {h(8)}-{h(4)}-{h(4)}\n",
    "results.csv": "run,tokens_per_second,secret_seed\na,123456.789,42\n",
    "passwd.txt": "root:x:0:0:root:/root:/bin/bash\nme:x:1000:1000::/home/me:/bin/bash\n",
    "hosts.yml": "all:\n  hosts:\n    node1: {ansible_user: me}\n  vars: {token_file: /run/secrets/token}\n",
    "openapi.yaml": "components:\n  securitySchemes:\n    token: {type: http, scheme: bearer}\n",
    "jupyter.md": "Open http://localhost:8888/?token=...\n",
    "kaggle_meta.json": '{"title": "x", "id": "me/x", "licenses": [{"name": "CC0-1.0"}]}',
}


def found(root: Path, relative: str, content: str) -> str | None:
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return named_as_credential(relative, is_folder=False) or credentials_in(path)


def test_there_are_a_hundred_of_each() -> None:
    assert (len(CREDENTIALS), len(HARMLESS)) == (100, 100)


def test_files_with_credentials_are_recognised(tmp_path: Path) -> None:
    assert [path for path, content in CREDENTIALS.items() if not found(tmp_path, path, content)] == []


def test_harmless_files_are_not(tmp_path: Path) -> None:
    what = {path: found(tmp_path, path, content) for path, content in HARMLESS.items()}
    assert {path: kind for path, kind in what.items() if kind} == {}


def test_only_the_beginning_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x\n" * 100 + CREDENTIALS["deploy_rsa"]
    assert found(tmp_path, "log", text) == "private key"
    monkeypatch.setattr(credentials, "_BYTES", 200)
    assert found(tmp_path, "log", text) is None
