"""--custom-agent-function-path examples.agents.calculator.agent

Talks to the model as to any other, with OpenAI's client, and calculates what it asks for.
"""

import json

from openai import AsyncOpenAI

from examples.agents.tools import TOOLS, calculate


async def agent(base_url, prompt, request_kwargs, metadata):
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    calculations, answer = 0, None
    async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
        while calculations < 8:
            completion = await client.chat.completions.create(messages=messages, tools=TOOLS, **request_kwargs)
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                answer = message.content
                break
            for call in message.tool_calls:
                calculations += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _result(call.function)})
    return {"calculations": calculations, "answer": answer}


def _result(function):
    """An agent answers wrong calls itself."""
    try:
        return calculate(**json.loads(function.arguments))
    except (ValueError, TypeError, ArithmeticError) as error:
        return f"error: {error}"
