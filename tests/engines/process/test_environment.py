"""Environment of an engine: which variables it gets."""

import pytest

from pipeline.engines.process.environment import passed_environment

ENVIRONMENT = {
    "PATH": "/bin", "HOME": "/root", "PYTHONPATH": "/x", "LC_ALL": "C", "CUDA_HOME": "/c",
    "NCCL_DEBUG": "1", "NCCLX": "1", "HF_TOKEN": "t", "HF_TOKEN_PATH": "p", "LCX": "1",
}  # fmt: skip


def test_all_of_the_environment_is_passed_but_pythonpath() -> None:
    assert passed_environment(ENVIRONMENT, None).keys() == ENVIRONMENT.keys() - {"PYTHONPATH"}


def test_named_variables_are_passed_with_those_that_every_process_needs() -> None:
    passed = passed_environment(ENVIRONMENT, ["NCCL_*", "HF_TOKEN", "PYTHONPATH"])
    assert passed.keys() == {"PATH", "HOME", "LC_ALL", "CUDA_HOME", "NCCL_DEBUG", "HF_TOKEN"}
    assert passed_environment(ENVIRONMENT, []).keys() == {"PATH", "HOME", "LC_ALL", "CUDA_HOME"}


@pytest.mark.parametrize(
    "name",
    [
        "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ACCOUNT_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "SLACK_WEBHOOK_URL",
        "GITHUB_TOKEN", "DB_PASSWORD", "SSH_AUTH_SOCK", "MY_ENDPOINTS_KEY", "NOTICES",
    ],
)  # fmt: skip
def test_secrets_are_passed_only_by_name(name: str) -> None:
    environment = {**ENVIRONMENT, name: "secret"}
    withheld = ["MY_ENDPOINTS_KEY", "NOTICES"]
    assert name not in passed_environment(environment, None, withheld=withheld)
    assert passed_environment(environment, [name], withheld=withheld)[name] == "secret"
    assert passed_environment(environment, ["*"], withheld=withheld)[name] == "secret"


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "SGLANG_MAX_TOKENS", "AWS_REGION", "NCCL_SOCKET_IFNAME", "KEYBOARD"],
)
def test_what_is_no_secret_is_passed(name: str) -> None:
    assert name in passed_environment({name: "1"}, None)


def test_token_of_the_hub_is_passed_until_the_model_is_on_disk() -> None:
    hub = {"HF_TOKEN", "HF_TOKEN_PATH"}
    assert hub <= passed_environment(ENVIRONMENT, None).keys()
    assert not hub & passed_environment(ENVIRONMENT, None, has_model=True).keys()
