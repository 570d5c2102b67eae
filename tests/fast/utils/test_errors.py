"""How a command ends that was used wrongly, and one that is wrong itself."""

import pytest

from miles.utils.errors import UserError, ends_in_a_sentence, sentence_of


def noted(error, *notes):
    for note in notes:
        error.add_note(note)
    return error


@pytest.mark.parametrize(
    "error, sentence",
    [
        (UserError("give less"), "give less"),
        (noted(UserError("give less"), "trainer rank 1 failed too"), "give less\ntrainer rank 1 failed too"),
        (ExceptionGroup("all", [UserError("a"), ExceptionGroup("two", [noted(UserError("b"), "n")])]), "a\nb\nn"),
        (ExceptionGroup("all", [UserError("a"), KeyError("b")]), None),
        (ValueError("zip() argument 2 is shorter than argument 1"), None),
        (KeyError("x"), None),
    ],
)
def test_only_what_is_meant_for_a_user_is_a_sentence(error, sentence):
    assert sentence_of(error) == sentence


def test_a_command_ends_in_a_sentence_or_a_traceback():
    def end(error):
        with pytest.raises(BaseException) as caught, ends_in_a_sentence():
            raise error
        return caught.value

    ended = end(UserError("give less"))
    assert isinstance(ended, SystemExit) and ended.code == "error: give less"  # Python prints it and exits with 1
    assert isinstance(end(KeyboardInterrupt()), SystemExit) and end(KeyboardInterrupt()).code == 130
    assert end(SystemExit(15)).code == 15
    for error in (ValueError("of the program"), KeyError("x")):
        assert end(error) is error
