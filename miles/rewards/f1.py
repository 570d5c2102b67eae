"""`--rm-type f1`: how many words the response shares with the label, as question answering is scored.

F1 of SQuAD (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250, section 6.1): with the words of response and label
as multisets, and n words in both, precision = n / words of the response, recall = n / words of the label, and
F1 = 2 * precision * recall / (precision + recall) = 2 n / (words of the response + words of the label).
"""

import functools
import re
import sys
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from miles.rewards.reward import Reward, label_of
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
# Answers without degrees: what is not one of them, word for word, shares nothing with it.
_CLOSED = ("yes", "no", "noanswer")


async def f1_reward(config: "RunConfig", sample: "Sample") -> float:
    """F1 of the words, from 0.0 to 1.0; case, punctuation, articles and white space aside.

    With a label of yes, no or noanswer it is 1.0 for that word alone and 0.0 otherwise. Words are what white space
    separates: a text in Chinese or Japanese is one.

    Raises:
        ValueError: the label has no words.
    """
    label, response = read_label(label_of(sample)), normalize(sample.response)
    if label in _CLOSED or response in _CLOSED:
        return float(label == response)
    right, answered = label.split(), response.split()
    shared = (Counter(right) & Counter(answered)).total()
    return 2 * shared / (len(right) + len(answered))


def read_label(label: str) -> str:
    """Its words.

    Raises:
        ValueError: it has none.
    """
    words = normalize(label)
    if not words:
        raise UserError(f"the label {label!r} has no words besides articles")
    return words


def normalize(text: str) -> str:
    """The words, in lower case and one space apart, without punctuation and English articles."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_ARTICLE.sub(" ", text.translate(_punctuation())).split())


@functools.cache
def _punctuation() -> dict[int, None]:
    """For str.translate, which is several times as fast as a look at each character."""
    codes = range(sys.maxunicode + 1)
    return dict.fromkeys(code for code in codes if unicodedata.category(chr(code)).startswith("P"))


F1 = Reward(name="f1", help="words in common", judge=f1_reward, read_label=read_label)
