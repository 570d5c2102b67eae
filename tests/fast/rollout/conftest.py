import pytest
from transformers import AutoTokenizer

from miles.utils.arguments import parse_args
from tests.fast.rollout.scripted import CHAT_TEMPLATE

HERE = "tests.fast.rollout.scripted"
HUB = "miles.rollout.generate_hub"


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="session")
def chat_flags(engine_flags, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = list(engine_flags)
    for name, value in (("--rollout-max-response-len", "400"), ("--rollout-max-context-len", "505")):
        flags[flags.index(name) + 1] = value
    return [
        *flags,
        *("--run-dir", str(tmp_path_factory.mktemp("run"))),
        *("--apply-chat-template", "--chat-template-path", str(template), "--generate-tool-call-parser", "qwen25"),
        *("--rollout-temperature", "0.8"),
    ]


@pytest.fixture(scope="session")
def tools_config(chat_flags):
    """A run with multi_turn and the tools of scripted.py."""
    return parse_args(
        [
            *chat_flags,
            *("--custom-generate-function-path", f"{HUB}.multi_turn.generate"),
            *("--generate-tool-specs-path", f"{HERE}.TOOLS"),
            *("--generate-execute-tool-function-path", f"{HERE}.execute"),
        ]
    )
