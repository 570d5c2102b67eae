import datetime
import decimal
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.tools.make_tiny_checkpoint import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])


def read(path, *, tokenizer=TOKENIZER, **form):
    return PromptDataset(str(path), tokenizer, PromptFormat(**{"label_key": "label", **form}), None)


@pytest.fixture
def write(tmp_path):
    def write_table(rows_a_group=1000, **columns):
        path = tmp_path / "prompts.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_a_group)
        return path

    return write_table


def test_rows_keep_order_text_and_numbers(write):
    path = write(
        input=["rev 12", "é\u2028"],
        label=pyarrow.array([2**62 + 1, None], pyarrow.int64()).fill_null(-3),
        metadata=[{"level": 2**62 + 1, "share": None}, None],
        other=[1.0, 2.0],
    )
    assert [(sample.prompt, sample.label, sample.metadata, sample.tokens) for sample in read(path)] == [
        ("rev 12", str(2**62 + 1), {"level": 2**62 + 1, "share": None}, list(b"rev 12")),
        ("é\u2028", "-3", {}, list("é\u2028".encode())),
    ]


def test_integers_beside_nulls_are_no_floats(write):
    metadata = pyarrow.array([{"n": 2**63 - 1}, {"n": None}], pyarrow.struct([("n", pyarrow.int64())]))
    labels = pyarrow.array([2**64 - 1, 0], pyarrow.uint64())
    data = read(write(input=["a", "b"], label=labels, metadata=metadata))
    assert data[0].metadata == {"n": 2**63 - 1} and data[0].label == str(2**64 - 1)


def test_chat_decimals_and_maps(write):
    metadata = pyarrow.array([[("level", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    path = write(input=[[{"role": "user", "content": "a"}]], label=[decimal.Decimal("1.50")], metadata=metadata)
    sample = read(path, apply_chat_template=True)[0]
    assert (sample.tokens, sample.label, sample.metadata) == ([USER, *b"a", ASSISTANT], "1.50", {"level": 1})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([{"day": datetime.date(2026, 3, 4)}], r"holds datetime.date\(2026, 3, 4\) \(date\); write it as a string"),
        ([{"list": [{"share": decimal.Decimal("1.5")}]}], r"holds Decimal\('1.5'\) \(Decimal\); write it as a string"),
        ([{"raw": b"\x00"}], r"holds b'\\x00' \(bytes\)"),
        (pyarrow.array([[(1, 2)]], pyarrow.map_(pyarrow.int64(), pyarrow.int64())), r"has the key 1 \(int\); keys are"),
    ],
)
def test_metadata_that_json_does_not_keep(write, metadata, message):
    """It is written into checkpoints and files of samples, at step N."""
    with pytest.raises(ValueError, match=f"prompts.parquet:row 1: 'metadata' \\(--metadata-key\\) {message}"):
        read(write(input=["a"], label=["b"], metadata=metadata))


def test_problems_name_the_row(write):
    path = write(input=["a", None, "c"], label=[1.0, 2.0, float("nan")])
    with pytest.raises(
        ValueError,
        match=r"(?s)2 unusable.*prompts.parquet:row 2: no 'input'.*prompts.parquet:row 3: the label 'label' is nan",
    ):
        read(path)
    with pytest.raises(ValueError, match="has no rows"):
        read(write(input=pyarrow.array([], pyarrow.string())))
    with pytest.raises(
        ValueError, match="has none of the columns input, label, metadata, tools; it has prompt, answer"
    ):
        read(write(prompt=["a"], answer=["b"]))


@pytest.mark.parametrize("rows_a_group", [1, 3, 8])
@pytest.mark.parametrize("rows", ["", "@[:]", "@[2:5]", "@[-3:]", "@[:-3]", "@[-5:-2]", "@[6:100]", "@[3:4]"])
def test_slices_and_row_groups(write, rows, rows_a_group):
    path = write(rows_a_group, input=list("abcdefgh"), label=list("01234567"))
    data = read(f"{path}{rows}")
    expected = eval(f"'abcdefgh'{rows.removeprefix('@') or '[:]'}")
    assert "".join(sample.prompt for sample in data) == expected
    backwards = list(range(len(data)))[::-1]
    assert "".join(sample.prompt for sample in data.take(backwards + [0])) == expected[::-1] + expected[0]


def test_only_the_row_groups_of_a_slice_are_read(write, monkeypatch):
    path = write(2, input=list("abcdefgh"), label=[None, None, "2", "3", "4", "5", None, None])
    data = read(f"{path}@[2:6]")
    assert [sample.label for sample in data] == ["2", "3", "4", "5"]
    scanned, read_again = [], []
    file = pyarrow.parquet.ParquetFile
    scan, read_group = file.iter_batches, file.read_row_group
    monkeypatch.setattr(file, "iter_batches", lambda self, n, g, *a: scanned.extend(g) or scan(self, n, g, *a))
    monkeypatch.setattr(file, "read_row_group", lambda self, g, *a: read_again.append(g) or read_group(self, g, *a))
    data = read(f"{path}@[2:6]")
    data.take([3, 0, 2, 1, 0])
    assert scanned == [1, 2] == read_again


def test_keys_that_a_column_of_objects_fills_up_with_null_are_taken_away(write):
    """Arrow gives all objects of a column the same keys; a template or a model must not see the others' parameters."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | tojson }}{{ tools | tojson }}"
    weather = {"name": "weather", "parameters": {"city": {"type": "string"}}}
    clock = {"name": "clock", "parameters": {"zone": {"type": "string"}}}
    called = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "GMT"}}}
    call = {"role": "assistant", "content": "", "tool_calls": [called]}
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}, call]]
    data = read(
        write(input=chats, tools=[[weather], [clock]]), tokenizer=tokenizer, label_key=None, apply_chat_template=True
    )
    for sample, chat, tool in zip(data, chats, (weather, clock), strict=True):
        messages, tools = (json.loads(text) for text in re.fullmatch(r"(\[.*\])(\[\{\"name.*)", sample.prompt).groups())
        assert messages == chat and tools == [tool] == sample.metadata["tools"]
