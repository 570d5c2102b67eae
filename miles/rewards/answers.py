"""Where in a response its answer stands. Text is only searched, in time linear in its length."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_END_OF_THINKING = "</think>"


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds; None without one, or where its brace is never closed.

    Braces inside may nest and may be escaped: \boxed{\{1, 2\}} holds \{1, 2\}.
    """
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = _BOX.match(text, start) if start >= 0 else None
    if box is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip()
    return None


def after_thinking(text: str) -> str | None:
    """What follows the last </think>; None without one."""
    _, mark, answer = text.rpartition(_END_OF_THINKING)
    return answer if mark else None
