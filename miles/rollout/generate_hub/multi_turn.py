"""Conversations with tools: the model writes, its calls are executed, their results follow, the model goes on.

Chosen by `--custom-generate-function-path miles.rollout.generate_hub.multi_turn.generate`.
"""

from typing import Any

from miles.config import RunConfig
from miles.rollout import engine_pool
from miles.rollout.answers import end_token_ids
from miles.rollout.generate import generate as complete
from miles.rollout.sessions.chat_format import ChatFormat
from miles.rollout.sessions.tool_calls import STATE, CallParser, execute, load_execute_tool, specs_of_path, tools_of
from miles.utils.types import Sample


def check(config: RunConfig, tokenizer: Any) -> None:
    """Raise ValueError where `generate` can't be used: function, schemas, parser or chat template are unusable."""
    load_execute_tool(config)
    specs = specs_of_path(config)
    CallParser(config.generate_tool_call_parser, tokenizer).check(specs or ())
    chat = ChatFormat.from_config(config, tokenizer, end_token_ids(config.hf_checkpoint, tokenizer))
    result = {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "1"}
    chat.follow(tokenizer.eos_token_id, [result], specs)


async def generate(config: RunConfig, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue the sample until the model answers without a call of a tool. The sample is changed in place.

    Ids that the model wrote stay as they are; what the template puts behind a turn, and the results of tools, are
    tokens with mask 0. All calls of a turn are executed, one after the other in the order written, and a call that
    fails is answered by a result that says so.

    It ends as TRUNCATED where the model still calls tools in its turn number --generate-max-turns, where the results
    leave no room for another turn, or where a turn is cut off by a limit. `max_new_tokens` of `sampling_params` bounds
    what the model writes from now on, --rollout-max-context-len all tokens. ABORTED: called again, it goes on. Without
    --partial-rollout it is ABORTED too where new weights came between its turns.

    Raises:
        ValueError: the sample has no tools, or the chat template can't continue the conversation.
    """
    chat, parser = _parts(config)
    function, tools = load_execute_tool(config), tools_of(config, sample)
    parser.check(tools)
    stop_ids = sampling_params.get("stop_token_ids") or ()
    if sample.response_length == 0 or STATE not in sample.metadata:
        sample.metadata[STATE] = {"turns": 0, "calls": 0, "failed_calls": 0, "turn_start": 0, "answer": None}
    state = sample.metadata[STATE]
    allowed = sample.trained_length + sampling_params["max_new_tokens"]

    def room(context: int = 0) -> int:
        """Tokens that the model may write once `context` more tokens of others are there."""
        assert config.rollout_max_context_len is not None, "a rule asks for it"
        return min(allowed - sample.trained_length, config.rollout_max_context_len - len(sample.tokens) - context)

    while True:
        await complete(config, sample, {**sampling_params, "max_new_tokens": room()})
        if sample.status is not Sample.Status.COMPLETED:
            return sample
        if not config.partial_rollout and len(set(sample.weight_versions)) > 1:
            sample.status = Sample.Status.ABORTED
            return sample
        state["turns"] += 1
        written = sample.tokens[sample.prompt_length + state["turn_start"] :]
        turn = parser.parse(chat.text(written, stop_ids), tools)
        if not turn.calls:
            state["calls"] += turn.unreadable
            state["failed_calls"] += turn.unreadable
            state["answer"] = turn.text
            return sample
        if state["turns"] >= config.generate_max_turns:
            sample.status = Sample.Status.TRUNCATED
            return sample
        results, failed = await execute(function, turn.calls, tools, sample)
        state["calls"] += len(turn.calls)
        state["failed_calls"] += failed
        context = chat.follow(sample.tokens[-1], results, tools)
        if room(len(context)) < 1:
            sample.status = Sample.Status.TRUNCATED
            return sample
        sample.append_context(context)
        state["turn_start"] = sample.response_length


_PARTS = "chat format and call parser"  # in what is shared of a pool


def _parts(config: RunConfig) -> tuple[ChatFormat, CallParser]:
    pool = engine_pool.current()
    if _PARTS not in pool.shared:
        chat = ChatFormat.from_config(config, pool.tokenizer, pool.end_ids)
        pool.shared[_PARTS] = chat, CallParser(config.generate_tool_call_parser, pool.tokenizer)
    return pool.shared[_PARTS]
