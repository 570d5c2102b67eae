"""What the prompts of a configuration must satisfy."""

from collections.abc import Iterator

from miles.config.values import Values

# Arguments of the tokenizer's apply_chat_template that Miles gives itself.
OWN_TEMPLATE_ARGUMENTS = ("conversation", "tools", "chat_template", "tokenize", "add_generation_prompt")


def _prompts(v: Values) -> Iterator[str]:
    if not v.prompt_data and v.data_source_path is None:
        yield "--prompt-data is required: a .jsonl or .parquet file with the prompts"


def _prompt_weights(v: Values) -> Iterator[str]:
    weights, files = v.prompt_data_weights, v.prompt_data
    if weights is None or not files:
        return
    if len(weights) != len(files):
        yield f"--prompt-data-weights has {len(weights)} weights for {len(files)} files of --prompt-data; give one each"
    for weight in weights:
        if weight <= 0:
            yield f"--prompt-data-weights {weight:g} must be above 0; leave out a file that is not to be used"


def _chat_template(v: Values) -> Iterator[str]:
    path, arguments = v.chat_template_path, v.apply_chat_template_kwargs
    given = [
        *(["--chat-template-path"] if path is not None else []),
        *(["--apply-chat-template-kwargs"] if arguments else []),
    ]
    if given and not v.apply_chat_template:
        yield f"{' and '.join(given)} without --apply-chat-template has no effect; add that, or drop it"
    for name in OWN_TEMPLATE_ARGUMENTS:
        if name in arguments:
            yield f"--apply-chat-template-kwargs: {name} is given by Miles; drop it"


DATA_RULES = [_prompts, _prompt_weights, _chat_template]
