"""Shows the samples of a file that --save-debug-rollout-data wrote: prompt, response, reward and what else is known.

The lines of a text begin with a bar: │, or ┆ where nothing is trained on, such as the output of a tool. Characters that
a terminal would obey, or not show, stand there as escapes.
"""

import functools
import itertools
import json
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from rich.console import Console
from rich.text import Text

from miles.rollout.sample_io import Header, read_samples
from miles.tools import run
from miles.utils.errors import UserError
from miles.utils.types import Sample

TRAINED, MASKED = "│ ", "┆ "
# Of Unicode's categories: control; format, which is invisible or turns the direction of text; surrogates; line ends.
ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")


class Block(NamedTuple):
    """A text, and what each line of it begins with."""

    bar: str
    text: Text


def show_samples(
    file: Annotated[Path, tyro.conf.Positional],
    index: int | None = None,
    group: int | None = None,
    sort: Literal["reward"] | None = None,
    limit: int = 10,
    tokens: bool = False,
    tokenizer: Path | None = None,
) -> None:
    """Print samples.

    Args:
        file: .jsonl or .jsonl.gz file.
        index: only the sample with this index.
        group: only the samples of this group.
        sort: reward: the best first, those without a reward last. Unset: as in the file.
        limit: most samples to show.
        tokens: also each token: id, text, whether it is trained on, log-probability in the engine (and the teacher).
        tokenizer: folder of the tokenizer, if it is no longer where the run had it.

    Raises: ValueError if the file is not one of samples, or has none of those asked for.
    """
    if limit < 1:
        raise UserError(f"--limit {limit}: at least 1 is needed")
    if not file.is_file():
        raise UserError(f"{file} is no file here")
    header, samples = read_samples(file)
    chosen = chosen_samples(samples, index, group, sort)
    if not chosen:
        groups = len({sample.group_index for sample in samples})
        raise UserError(f"{file} has no such sample among its {len(samples)} of {groups} group(s)")
    words = Words(header.hf_checkpoint if tokenizer is None else str(tokenizer))
    # In a file or a pipe lines are as long as they are.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    console = Console(markup=False, emoji=False, highlight=False)
    shown = [sample_blocks(sample, words, tokens=tokens) for sample in chosen[:limit]]
    for block in itertools.chain(summary(file, header, samples), *shown):
        for line in _lines(block, console, width):
            console.print(line, soft_wrap=True)
    if len(chosen) > limit:
        console.print(f"\n{len(chosen) - limit} more; --limit {len(chosen)} shows all")


def chosen_samples(samples: Sequence[Sample], index: int | None, group: int | None, sort: str | None) -> list[Sample]:
    """Those of an index or a group, in the order asked for."""
    chosen = [
        sample
        for sample in samples
        if (index is None or sample.index == index) and (group is None or sample.group_index == group)
    ]
    if sort == "reward":
        chosen.sort(key=lambda sample: (sample.reward is None, -(sample.reward or 0)))
    return chosen


class Words:
    """The text of tokens, by the tokenizer in a folder; without one there is none.

    The folder comes from the file: it is read if it is here, and never fetched.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    @functools.cached_property
    def _tokenizer(self) -> Any:
        if self._folder is None or not Path(self._folder).is_dir():
            return None
        from transformers import AutoTokenizer  # takes seconds: only for those who use it

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def of(self, tokens: Sequence[int]) -> str | None:
        """The text, special tokens too."""
        return None if self._tokenizer is None else self._tokenizer.decode(tokens)


def summary(file: Path, header: Header, samples: Sequence[Sample]) -> Iterator[Block]:
    """What is in a file."""
    groups = len({sample.group_index for sample in samples})
    of = "" if header.evaluation is None else f"evaluation {header.evaluation} after "
    text = f"{file}: {of}rollout {header.rollout_id}, {len(samples)} sample(s) of {groups} group(s)"
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        text += f"; mean reward {sum(rewards) / len(rewards):.4g} of {len(rewards)}"
    statuses = Counter(sample.status.value for sample in samples)
    text += "; " + ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    yield Block("", escaped(text))


def sample_blocks(sample: Sample, words: Words, *, tokens: bool) -> Iterator[Block]:
    """All of a sample; with tokens each token on a line of its own."""
    yield Block("", Text("\n").append_text(_heading(sample)))
    yield _title("prompt")
    if isinstance(sample.prompt, str):
        yield Block(MASKED, escaped(sample.prompt))
    else:
        yield Block(MASKED, _json(sample.prompt))
    if sample.label is not None:
        yield _title("label")
        yield Block(MASKED, escaped(sample.label))
    yield _title("response")
    yield from _response(sample, words)
    if sample.metadata:
        yield _title("metadata")
        yield Block(MASKED, _json(sample.metadata))
    if tokens:
        yield from _tokens(sample, words)


def _title(text: str) -> Block:
    return Block("", Text().append(text, style="bold"))


def escaped(text: str) -> Text:
    """The text as it may be printed, line ends and tabs kept: what is escaped is red."""
    result = Text()
    for is_escaped, characters in itertools.groupby(text, _is_escaped):
        part = "".join(characters)
        if is_escaped:
            result.append(part.encode("unicode_escape").decode(), style="red")
        else:
            result.append(part)
    return result


def _is_escaped(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ESCAPED


def _json(value: Any) -> Text:
    return escaped(json.dumps(value, ensure_ascii=False))


def _heading(sample: Sample) -> Text:
    mask = _mask(sample)
    piece = "" if sample.rollout_id is None else f" (trajectory {sample.rollout_id})"
    reward = "none" if sample.reward is None else f"{sample.reward:.4g}"
    parts = [
        f"sample {sample.index}{piece} of group {sample.group_index}",
        f"reward {reward}",
        sample.status.value,
        f"prompt {sample.prompt_length} tokens",
        f"response {sample.response_length}, {sum(mask)} trained",
    ]
    if sample.weight_versions:
        calls = itertools.zip_longest(sample.weight_versions, sample.weight_version_lengths)
        parts.append("weights " + ", ".join(v if tokens is None else f"{v} ({tokens} tokens)" for v, tokens in calls))
    if sample.remove_sample:
        parts.append("removed: nothing of it is trained on")
    text = escaped("  ".join(parts))
    text.stylize("bold reverse")
    return text


def _mask(sample: Sample) -> list[int]:
    return [0] * sample.response_length if sample.remove_sample else sample.mask.tolist()


def _response(sample: Sample, words: Words) -> Iterator[Block]:
    mask, response = _mask(sample), sample.tokens[sample.prompt_length :]
    if len(set(mask)) < 2:
        yield Block(TRAINED if any(mask) else MASKED, escaped(sample.response))
        return
    parts, start = [], 0
    for trained, run_of in itertools.groupby(mask):
        end = start + len(list(run_of))
        parts.append((trained, start, end, words.of(response[start:end])))
        start = end
    if any(text is None for *_, text in parts):
        yield Block(TRAINED, escaped(sample.response))
        places = ", ".join(f"{start} to {end - 1}" for trained, start, end, _ in parts if not trained)
        yield Block("", Text(f"not trained on: response tokens {places}; --tokenizer FOLDER shows which text that is"))
        return
    for trained, _, _, text in parts:
        assert text is not None, "looked at above"
        yield Block(TRAINED, escaped(text)) if trained else Block(MASKED, _dim(escaped(text)))


def _dim(text: Text) -> Text:
    text.stylize("dim")
    return text


def _tokens(sample: Sample, words: Words) -> Iterator[Block]:
    both = {"engine": sample.rollout_log_probs, "teacher": sample.teacher_log_probs}
    columns = {name: values for name, values in both.items() if values is not None}
    yield _title("tokens" + f"{'':>8}id" + "".join(f"{name:>10}" for name in columns))
    mask = [0] * sample.prompt_length + _mask(sample)
    for place, (token, trained) in enumerate(zip(sample.tokens, mask, strict=True)):
        answered = place - sample.prompt_length
        numbers = "".join(f"{values[answered]:10.4f}" if answered >= 0 else " " * 10 for values in columns.values())
        text = words.of([token])
        shown = Text() if text is None else _json(text)
        yield Block(TRAINED if trained else MASKED, Text(f"{place:>6}{token:>8}{numbers}  ").append_text(shown))


def _lines(block: Block, console: Console, width: int | None) -> Iterator[Text]:
    if width is None:
        lines = block.text.split("\n", allow_blank=True)
    else:
        lines = block.text.wrap(console, max(width - len(block.bar), 1))
    for line in lines:
        yield Text().append(block.bar, style="dim").append_text(line)


if __name__ == "__main__":
    run(show_samples, __doc__)
