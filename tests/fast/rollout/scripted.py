"""A model whose text is scripted, behind a real pool, and a chat template with tools."""

import asyncio

from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling

PAUSE = "\0"  # in a scripted text: the model writes no more until it is aborted

CHAT_TEMPLATE = """\
{%- if tools -%}
tools: {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}{{ '\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|end|>{{ '\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|user|>{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|end|>{{ '\n' }}{%- endif -%}
{%- else -%}
<|user|>{{ message.content }}<|end|>{{ '\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
    for name in ("add", "divide")
]


async def execute(name, arguments, sample):
    """The tools of TOOLS; it fails where arithmetic does, and hangs for a None."""
    if arguments["a"] is None:
        await asyncio.Event().wait()
    return str(arguments["a"] + arguments["b"] if name == "add" else arguments["a"] / arguments["b"])


def call(name, arguments):
    """How the model writes a call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ScriptedEngine:
    """Takes the place of `SGLangClient`: `write(prompt)` is what the model writes next, special tokens and all."""

    url = "http://scripted"

    def __init__(self, tokenizer, write):
        self.tokenizer, self.write = tokenizer, write
        self.version = "1"
        self.requests = []
        self.writing = asyncio.Event()  # set while a text is at its PAUSE
        self._aborted = asyncio.Event()

    async def generate(self, input_ids, sampling_params):
        return [await self._one(*one) for one in zip(input_ids, sampling_params, strict=True)]

    async def _one(self, prompt_ids, given):
        self.requests.append((list(prompt_ids), dict(given)))
        text, *paused = self.write(self.tokenizer.decode(prompt_ids)).split(PAUSE)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        reason = {"type": "stop"}
        if len(ids) >= given["max_new_tokens"]:
            ids, reason = ids[: given["max_new_tokens"]], {"type": "length"}
        elif paused:
            self._aborted.clear()
            self.writing.set()
            await self._aborted.wait()
            reason = {"type": "abort", "message": "aborted"}
        meta = {
            "finish_reason": reason,
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"output_ids": ids, "meta_info": meta}

    async def abort(self, request_id=None):
        self.writing.clear()
        self._aborted.set()


def scripted_pool(config, tokenizer, write):
    """A pool of one `ScriptedEngine`, and the engine. `write` may be a list: the texts in their order."""
    if not callable(write):
        texts = iter(write)

        def write(prompt):
            return next(texts)

    async def all_live():
        return {}

    engine = ScriptedEngine(tokenizer, write)
    return EnginePool(config, [engine], 512, tokenizer, all_live), engine


def parameters(config, sample):
    """The sampling parameters that a generate function gets."""
    return Sampling.for_rollout(config).parameters(sample)
