"""docs/recipes/index.md."""

from tests.fast.scripts.launching import SCRIPTS

from launcher import docs  # isort: skip


def test_the_page_is_what_the_records_say():
    assert docs.PAGE.read_text() == docs.page(), "run `python scripts/launcher/docs.py`"
    for path in SCRIPTS:
        assert path.stem == "run_tiny" or f"`{path.name}`" in docs.PAGE.read_text()
