import pytest

from miles.rollout.sft_rollout import sft_samples
from miles.tools.make_tiny_checkpoint import byte_tokenizer
from miles.utils.types import Sample

TOKENIZER = byte_tokenizer()


def test_the_label_and_the_end_token_are_the_response():
    ((sample,),) = sft_samples([[Sample(prompt="rev é", tokens=list("rev é".encode()), label="é ver")]], TOKENIZER)
    sample.validate()
    assert sample.tokens == [*"rev éé ver".encode(), TOKENIZER.eos_token_id]
    assert sample.response == "é ver" and sample.prompt_length == 6
    assert sample.loss_mask == [1] * sample.response_length == [1] * 7
    assert sample.status is Sample.Status.COMPLETED and sample.reward == 0.0


def test_a_missing_label_or_end_token_is_refused():
    with pytest.raises(ValueError, match="sample 4 has no label"):
        sft_samples([[Sample(index=4)]], TOKENIZER)
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        sft_samples([[Sample(label="1")]], endless)
