"""What the flags of rewards must satisfy. Which reward is given, and its labels, are rules of validate.py."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from miles.config.values import Values

# The numbers of the dict that dapo returns.
DAPO_KEYS = ("score", "acc")


def _remote_reward(v: Values) -> Iterator[str]:
    if v.rm_url is None:
        if v.rm_type == "remote_rm" and v.needs_engines:
            yield "--rm-type remote_rm needs --rm-url, the address of its service, such as http://10.0.0.7:8000/reward"
        return
    try:
        url = urlsplit(v.rm_url)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        yield f"--rm-url {v.rm_url} must be an address such as http://10.0.0.7:8000/reward"


def _group_reward(v: Values) -> Iterator[str]:
    if v.group_rm and v.custom_rm_path is None and v.needs_engines:
        yield (
            "--group-rm needs --custom-rm-path, a function of (config, samples): the built-in rewards look at one "
            "sample each; add it, or drop --group-rm"
        )


def _reward_keys(v: Values) -> Iterator[str]:
    if v.rm_type != "dapo" or not v.needs_engines:
        return
    for flag, key in (("--reward-key", v.reward_key), ("--eval-reward-key", v.eval_reward_key)):
        if key is None and flag == "--reward-key":
            yield "--rm-type dapo gives score (1 or -1) and acc (1 or 0): choose one with --reward-key"
        elif key is not None and key not in DAPO_KEYS:
            yield f"{flag} {key} is no number of --rm-type dapo, which gives {' and '.join(DAPO_KEYS)}"


REWARD_RULES = [_remote_reward, _group_reward, _reward_keys]
