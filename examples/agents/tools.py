"""--generate-tool-specs-path examples.agents.tools.TOOLS
--generate-execute-tool-function-path examples.agents.tools.execute

A calculator. What the model writes is taken apart, never evaluated.
"""

import operator

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates with two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number"},
                    "operation": {"type": "string", "enum": list(OPERATIONS)},
                    "b": {"type": "number"},
                },
                "required": ["a", "operation", "b"],
            },
        },
    }
]


async def execute(name, arguments, sample):
    sample.metadata["calculations"] = sample.metadata.get("calculations", 0) + 1
    return calculate(**arguments)


def calculate(a, operation, b):
    if operation not in OPERATIONS or not all(type(number) in (int, float) for number in (a, b)):
        raise ValueError(f"two numbers and one of {' '.join(OPERATIONS)} are needed")
    return str(OPERATIONS[operation](a, b))
