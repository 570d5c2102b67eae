import json
import os
import re
import tracemalloc

import pytest

from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_file import ROWS_AT_ONCE
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.tools.make_tiny_checkpoint import byte_tokenizer
from miles.utils.errors import UserError

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])


def read(path, *, tokenizer=TOKENIZER, max_prompt_len=None, **form):
    return PromptDataset(str(path), tokenizer, PromptFormat(**{"label_key": "label", **form}), max_prompt_len)


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
        return path

    return write_lines


GOOD = '{"input": "rev 12", "label": "21"}'


def test_rows_keep_order_text_and_tokens(write):
    data = read(write(GOOD, '{"input": "é😀", "label": "ü", "metadata": {"level": 3, "share": 0.5}}'))
    assert len(data) == 2
    assert (data[0].prompt, data[0].label, data[0].metadata) == ("rev 12", "21", {})
    assert data[0].tokens == list(b"rev 12") and data[0].response_length == 0
    assert data[1].prompt == "é😀" and data[1].tokens == list("é😀".encode()) and data[1].label == "ü"
    assert data[1].metadata == {"level": 3, "share": 0.5}
    data[1].validate()
    data[1].tokens.append(0)
    assert list(data) == data.take([0, 1]) and data.take([1, 0, 1])[2] == data[1] and len(data[1].tokens) == 6


def test_byte_order_mark_crlf_and_blank_lines_lose_no_row(write):
    data = read(
        write(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n", b"\r\n", b"  \n", GOOD.encode() + b"\r\n", GOOD.encode())
    )
    assert [sample.prompt for sample in data] == ["rev 12"] * 3


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "1" * 5000, "0.10", "-7", "1e400", "1E-3"])
def test_a_number_as_label_keeps_every_digit(write, number):
    assert read(write(f'{{"input": "a", "label": {number}}}'))[0].label == number


def test_no_label_key_gives_no_labels(write):
    assert read(write(GOOD), label_key=None)[0].label is None


BAD_ROWS = {
    "trailing comma": ('{"input": "a", "label": "b",}', "not valid JSON"),
    "bare number": ("42", "this is a number"),
    "list": ("[1]", "this is a list"),
    "NaN": ('{"input": "a", "label": NaN}', "NaN is not valid JSON"),
    "infinity": ('{"input": "a", "label": -Infinity}', "-Infinity is not valid JSON"),
    "duplicate key": ('{"input": "a", "input": "c", "label": "b"}', "given twice: 'input'"),
    "duplicate key inside": ('{"input": "a", "label": "b", "metadata": {"x": 1, "x": 2}}', "given twice: 'x'"),
    "two objects": (GOOD + GOOD, "not valid JSON"),
    "no input": ('{"prompt": "a", "label": "b"}', "no 'input' .*the row has 'prompt', 'label'"),
    "null input": ('{"input": null, "label": "b"}', "no 'input'"),
    "number as input": ('{"input": 12, "label": "b"}', "'input' is 12"),
    "empty input": ('{"input": "", "label": "b"}', "'input' is empty"),
    "blank input": ('{"input": " \\n", "label": "b"}', "'input' is empty"),
    "no label": ('{"input": "a"}', "no label 'label'"),
    "null label": ('{"input": "a", "label": null}', "no label 'label'"),
    "bool label": ('{"input": "a", "label": true}', "the label 'label' is True"),
    "list label": ('{"input": "a", "label": ["b"]}', "a string or a number is allowed"),
    "metadata": ('{"input": "a", "label": "b", "metadata": [1]}', "'metadata' .* is \\[1\\]"),
    "infinite metadata": ('{"input": "a", "label": "b", "metadata": {"x": 1e999}}', "too large for a float"),
    "huge metadata": ('{"input": "a", "label": "b", "metadata": {"x": %s}}' % ("9" * 5000), "write it as a string"),
    "half a surrogate pair": ('{"input": "\\ud800", "label": "b"}', "not Unicode text"),
    "chat without template": ('{"input": [{"role": "user", "content": "a"}], "label": "b"}', "--apply-chat-template"),
    "deep nesting": ("[" * 200_000, "nested too deeply"),
    "latin-1": (b'{"input": "\xe9", "label": "b"}\n', "not UTF-8"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_file_and_line(write, row, message):
    path = write(GOOD, "", row)
    with pytest.raises(ValueError, match=f"(?s)1 unusable row.*{path}:3: .*{message}"):
        read(path)


def test_all_problems_at_once_first_ten_and_their_number(write):
    with pytest.raises(
        ValueError, match=r"(?s)12 unusable row\(s\).*jsonl:2: .*jsonl:11: .*\.\.\. and 2 more$"
    ) as error:
        read(write(GOOD, *["42"] * 12))
    assert str(error.value).count("prompts.jsonl:") == 1 + 10


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_an_empty_file_is_refused(write, lines):
    with pytest.raises(ValueError, match="prompts.jsonl has no rows"):
        read(write(*lines))


def test_other_endings_and_missing_files_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="ends in '.csv'; allowed are .jsonl and .parquet"):
        read(write(GOOD, name="prompts.csv"))
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="not a parquet file"):
        read(write(GOOD, name="prompts.parquet"))


def test_prompt_length_is_counted_in_tokens_after_the_template(write):
    path = write(json.dumps({"input": "字" * 20, "label": "x"}), json.dumps({"input": "😀" * 15, "label": "y"}))
    assert [len(sample.tokens) for sample in read(path, max_prompt_len=60)] == [60, 60]
    with pytest.raises(ValueError, match="has only prompts of more than 59 tokens; the first, .*jsonl:1 has 60 tokens"):
        read(path, max_prompt_len=59)
    with pytest.raises(ValueError, match="jsonl:1 has 62 tokens: raise --rollout-max-prompt-len"):
        read(path, max_prompt_len=60, apply_chat_template=True)


def test_prompts_too_long_are_left_out_counted_and_the_order_stays(write, caplog):
    lengths = [3, 9, 1, 8, 5, 2]
    rows = [json.dumps({"input": "abcdefghi"[:n], "label": str(n)}) for n in lengths]
    data = read(write(*rows), max_prompt_len=5)
    assert [len(sample.tokens) for sample in data] == [3, 1, 5, 2] == [int(sample.label) for sample in data]
    assert (len(data), data.too_long, data.longest_prompt) == (4, 2, 5)
    (record,) = caplog.records
    assert re.search(r"left out 2 of 6 prompts of more than 5 tokens; the first, .*:2 has 9 tokens$", record.message)
    caplog.clear()
    assert len(read(write(*rows), max_prompt_len=9)) == 6 and not caplog.records


def test_chat_messages_too_long_are_left_out_like_texts(write):
    chats = [[{"role": "user", "content": "a" * n}] for n in (1, 9, 2)]
    data = read(
        write(*(json.dumps({"input": chat, "label": "x"}) for chat in chats)),
        max_prompt_len=4,
        apply_chat_template=True,
    )
    assert [sample.prompt for sample in data] == ["<|user|>a<|assistant|>", "<|user|>aa<|assistant|>"]


def test_a_bad_row_is_refused_beside_prompts_too_long(write):
    with pytest.raises(ValueError, match=r"1 unusable row.*\n.*:2: not valid"):
        read(write(GOOD, "{"), max_prompt_len=5)


def test_a_string_with_a_template_is_one_user_message(write):
    sample = read(write(GOOD), apply_chat_template=True)[0]
    assert sample.tokens == [USER, *b"rev 12", ASSISTANT]
    assert sample.prompt == "<|user|>rev 12<|assistant|>"


def test_chat_messages_equal_the_tokenizers_own_rendering(write):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "eno"},
        {"role": "user", "content": "two"},
    ]
    sample = read(write(json.dumps({"input": messages, "label": "owt"})), apply_chat_template=True)[0]
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert sample.tokens == rendered


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], "message 1 of 'input': a message must be an object with a 'role'"),
        ([{"content": "hi"}], "an object with a 'role'"),
        ([{"role": "tool", "content": "hi"}], "refuses the messages: this template knows"),
    ],
)
def test_bad_chat_messages(write, messages, message):
    with pytest.raises(ValueError, match=f"jsonl:1: .*{message}"):
        read(write(json.dumps({"input": messages, "label": "x"})), apply_chat_template=True)


def test_template_arguments_reach_the_template(write):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ style }}: {{ messages[0]['content'] }}"
    styled = dict(tokenizer=tokenizer, apply_chat_template=True)
    assert read(write(GOOD), chat_template_kwargs={"style": "brief"}, **styled)[0].prompt == "brief: rev 12"
    with pytest.raises(ValueError, match="--apply-chat-template-kwargs: the chat template has no stile"):
        read(write(GOOD), chat_template_kwargs={"stile": "brief"}, **styled)
    other = "{{ messages[0]['content'] }}?"
    assert read(write(GOOD), chat_template=other, **styled)[0].prompt == "rev 12?"
    tokenizer.chat_template = None
    assert read(write(GOOD), chat_template=other, **styled)[0].prompt == "rev 12?"
    with pytest.raises(ValueError, match="no chat template; give --chat-template-path"):
        read(write(GOOD), **styled)


LETTERS = [json.dumps({"input": letter, "label": str(i)}) for i, letter in enumerate("abcdefgh")]
SLICES = [
    "[:]",
    "[2:5]",
    "[3:]",
    "[:3]",
    "[-3:]",
    "[:-3]",
    "[-5:-2]",
    "[2:-2]",
    "[-2:100]",
    "[-100:2]",
    "[0:1]",
    "[ 1 : 2 ]",
]


@pytest.mark.parametrize("rows", SLICES)
def test_a_slice_takes_what_python_takes(write, rows):
    path = write("", *LETTERS[:4], " ", *LETTERS[4:])
    assert "".join(sample.prompt for sample in read(f"{path}@{rows}")) == eval(f"'abcdefgh'{rows}")


def test_rows_outside_a_slice_are_not_looked_at(write):
    path = write("{", *LETTERS, "42")
    assert "".join(sample.prompt for sample in read(f"{path}@[1:-1]")) == "abcdefgh"
    with pytest.raises(ValueError, match=r"1 unusable row\(s\).*\n.*:10: a JSON object is needed"):
        read(f"{path}@[1:]")


@pytest.mark.parametrize("rows", ["[5:3]", "[8:]", "[3:3]", "[:-8]", "[-2:0]"])
def test_a_slice_without_rows_is_refused(write, rows):
    with pytest.raises(ValueError, match=f"jsonl@{re.escape(rows)} has no rows"):
        read(f"{write(*LETTERS)}@{rows}")


@pytest.mark.parametrize("rows", ["[]", "[3]", "[::2]", "[a:b]", "[1.5:]", "[-:]", "[1:2", "[1_0:]"])
def test_other_slices_are_refused(write, rows):
    with pytest.raises(ValueError, match=r"must be \[a:b\]|allowed are .jsonl"):
        read(f"{write(*LETTERS)}@{rows}")


def test_text_is_kept_exactly(write):
    texts = ["e\u0301 \u00e9", "a\u2028b\u2029c\x85d", "\x00\x1f", "\U0001f600\ufeff", "ﬁ Å Ω", " a\t\r\n ", "\ufeffa"]
    for ascii_only in (True, False):
        data = read(write(*(json.dumps({"input": t, "label": t}, ensure_ascii=ascii_only) for t in texts)))
        assert [(sample.prompt, sample.label, sample.tokens) for sample in data] == [
            (text, text, list(text.encode())) for text in texts
        ]


def test_integers_of_metadata_are_exact_and_files_may_be_joined(write):
    bom = b"\xef\xbb\xbf"
    big = 2**64 + 1, -(10**4000) + 7
    rows = [f'{{"input": "a", "label": {n}, "metadata": {{"n": {n}, "list": [{n}]}}}}\n'.encode() for n in big]
    data = read(write(bom + rows[0], bom + rows[1]))
    assert [sample.metadata for sample in data] == [{"n": n, "list": [n]} for n in big]
    assert [sample.label for sample in data] == [str(n) for n in big]


def test_a_file_that_is_written_to_during_the_run_is_noticed(write):
    path = write(*LETTERS)
    data = read(path)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"X"'))
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="prompts.jsonl was written to while the run reads it"):
        data[0]


def test_a_file_that_is_replaced_stays_as_it_was_read(write, tmp_path):
    path = write(*LETTERS)
    data = read(path)
    write(*LETTERS[::-1], name="new.jsonl").rename(path)
    assert "".join(sample.prompt for sample in data) == "abcdefgh"


def test_a_large_file_is_not_held(tmp_path):
    path, rows, size = tmp_path / "large.jsonl", 1000, 2000
    with path.open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"input": f"{row} {'x' * size}", "label": "y", "other": "z" * size}) + "\n")
    tracemalloc.start()
    try:
        data = read(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert data[rows - 1].prompt.startswith(f"{rows - 1} x")
    assert held < 0.05 * rows * size and peak < 30 * ROWS_AT_ONCE * size < 2 * rows * size


def test_a_label_that_its_reward_cannot_use_is_a_bad_row(write):
    rows = [
        {"input": "a", "label": "3 1/4"},
        {"input": "b", "label": "The answer is 6"},
        {"input": "c", "label": ""},
        {"input": "d", "label": "The answer is 6", "metadata": {"rm_type": "exact"}},
        {"input": "e", "label": "4", "metadata": {"rm_type": "gpqa"}},
        {"input": "f", "label": "4", "metadata": {"rm_type": "maths"}},
    ]
    path = write(*map(json.dumps, rows))
    assert len(read(path)) == 6, "without a built-in reward a label is what anyone makes of it"
    with pytest.raises(ValueError) as error:
        read(path, built_in_rewards=True, rm_type="math")
    places = re.findall(r"jsonl:(\d): (.{20})", str(error.value))
    assert [line for line, _ in places] == ["2", "3", "5", "6"]
    assert places[0][1] == "the label 'The answe" and "metadata names the reward 'maths'" in str(error.value)
    with pytest.raises(ValueError, match=r"1 unusable row\(s\).*\n.*jsonl:3: the label '' is empty"):
        read(path, built_in_rewards=True, metadata_overrides={"rm_type": "exact"})
