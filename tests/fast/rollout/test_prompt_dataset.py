import decimal
import json

import pyarrow
import pyarrow.parquet
import pytest

from miles.rollout.data_source import PromptDataset
from miles.tools.make_tiny_checkpoint import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])


def read(path, **changes):
    settings = dict(
        input_key="input",
        label_key="label",
        metadata_key="metadata",
        apply_chat_template=False,
        apply_chat_template_kwargs={},
        max_prompt_len=None,
    )
    return PromptDataset(path, TOKENIZER, **(settings | changes))


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
        return path

    return write_lines


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


GOOD = '{"input": "rev 12", "label": "21"}'


def test_rows_keep_order_text_and_tokens(write):
    data = read(write(GOOD, '{"input": "é😀", "label": "ü", "metadata": {"level": 3, "share": 0.5}}'))
    assert len(data) == 2
    assert (data[0].prompt, data[0].label, data[0].metadata) == ("rev 12", "21", {})
    assert data[0].tokens == list(b"rev 12") and data[0].response_length == 0
    assert data[1].prompt == "é😀" and data[1].tokens == list("é😀".encode()) and data[1].label == "ü"
    assert data[1].metadata == {"level": 3, "share": 0.5}
    data[1].validate()


def test_byte_order_mark_crlf_and_blank_lines_lose_no_row(write):
    data = read(
        write(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n", b"\r\n", b"  \n", GOOD.encode() + b"\r\n", GOOD.encode())
    )
    assert [sample.prompt for sample in data.samples] == ["rev 12"] * 3


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
    path = write(json.dumps({"input": "字" * 20, "label": "x"}))
    assert len(read(path, max_prompt_len=60)[0].tokens) == 60
    with pytest.raises(ValueError, match="jsonl:1: the prompt has 60 tokens; at most 59 are allowed"):
        read(path, max_prompt_len=59)
    with pytest.raises(ValueError, match="has 62 tokens; at most 60"):
        read(path, max_prompt_len=60, apply_chat_template=True)


def test_over_long_prompts_are_listed_with_the_other_problems(write):
    with pytest.raises(ValueError, match=r"(?s)2 unusable.*:2: not valid.*:1: the prompt has 6 tokens"):
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
        (["hi"], "each with a 'role'"),
        ([{"content": "hi"}], "each with a 'role'"),
        ([{"role": "tool", "content": "hi"}], "refuses the messages: this template knows"),
    ],
)
def test_bad_chat_messages(write, messages, message):
    with pytest.raises(ValueError, match=f"jsonl:1: .*{message}"):
        read(write(json.dumps({"input": messages, "label": "x"})), apply_chat_template=True)


def test_template_arguments_reach_the_template(write):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ style }}: {{ messages[0]['content'] }}"
    data = PromptDataset(
        write(GOOD),
        tokenizer,
        input_key="input",
        label_key=None,
        metadata_key="metadata",
        apply_chat_template=True,
        apply_chat_template_kwargs={"style": "brief"},
        max_prompt_len=None,
    )
    assert data[0].prompt == "brief: rev 12"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        PromptDataset(
            write(GOOD),
            tokenizer,
            input_key="input",
            label_key=None,
            metadata_key="metadata",
            apply_chat_template=True,
            apply_chat_template_kwargs={},
            max_prompt_len=None,
        )


def test_parquet(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet",
        input=["rev 12", "é"],
        label=pyarrow.array([2**62 + 1, -3]),
        metadata=[{"level": 1}, None],
        other=[1.0, 2.0],
    )
    data = read(path)
    assert [(sample.prompt, sample.label, sample.metadata) for sample in data.samples] == [
        ("rev 12", str(2**62 + 1), {"level": 1}),
        ("é", "-3", {}),
    ]
    chat = write_parquet(
        tmp_path / "b.parquet", input=[[{"role": "user", "content": "a"}]], label=[decimal.Decimal("1.50")]
    )
    assert read(chat, apply_chat_template=True)[0].tokens == [USER, *b"a", ASSISTANT]
    assert read(chat, apply_chat_template=True)[0].label == "1.50"


def test_parquet_problems_name_the_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", input=["a", None, "c"], label=[1.0, 2.0, float("nan")])
    with pytest.raises(
        ValueError, match=r"(?s)2 unusable.*a.parquet:row 2: no 'input'.*a.parquet:row 3: the label 'label' is nan"
    ):
        read(path)
    with pytest.raises(ValueError, match="has no rows"):
        read(write_parquet(tmp_path / "b.parquet", input=pyarrow.array([], pyarrow.string())))
