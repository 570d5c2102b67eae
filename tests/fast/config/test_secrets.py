import pytest

from miles.config.run_config import RunConfig
from miles.config.secrets import is_secret, masked, secrets_of
from miles.config.sglang_args import server_arguments


def test_names_of_secrets():
    for name in ("--wandb-key", "sglang_api_key", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db-password"):
        assert is_secret(name), name
    for name in ("reward_key", "label_key", "max_tokens_per_gpu", "skip_tokenizer_init", "TOKENIZERS_PARALLELISM"):
        assert not is_secret(name), name


def test_secrets_are_texts_wherever_they_stand():
    values = {"hf_token": "abc", "sglang": {"api_key": "def", "tp": 2}, "token": ["g"], "input_key": "no", "secret": 7}
    assert list(secrets_of(values)) == ["abc", "def", "g"]


@pytest.mark.parametrize("names", [RunConfig.model_fields, server_arguments()], ids=["ours", "SGLang's"])
def test_what_is_taken_for_a_secret_among_the_flags(names):
    taken = {name for name in names if is_secret(name)}
    known = {"wandb_key", "api_key", "admin_api_key", "ssl_keyfile_password"}
    numbers = {"bucket_time_to_first_token", "kt_max_deferred_experts_per_token"}
    assert taken <= known | numbers, "is it a secret? then to the known ones"


def test_a_masked_text():
    text = "--rm-url http://me:pass@host/a --wandb-key abcdef abc http://host/@b"
    assert masked(text, ["abc", "abcdef", ""]) == "--rm-url http://***@host/a --wandb-key *** *** http://host/@b"
