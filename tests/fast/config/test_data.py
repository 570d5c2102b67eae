"""How prompt files may be written."""

import pytest

from miles.config.resolve import ConfigError, resolve


def test_one_file_in_yaml_needs_no_brackets(argv, folder):
    (folder / "run.yaml").write_text("prompt_data: train.jsonl\n")
    flags = argv("--config run.yaml", prompt_data=None)
    assert resolve(flags).config.prompt_data == [str(folder / "train.jsonl")]
    with pytest.raises(ConfigError, match="--rollout-batch-size"):
        resolve([*flags, "--rollout-batch-size", "0"])
