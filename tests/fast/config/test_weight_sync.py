import pytest

from miles.config.resolve import ConfigError, resolve


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"update_weight_transfer_mode": "disk"}, "disk needs --update-weight-disk-dir, a folder that"),
        ({"update_weight_disk_dir": "/x"}, "--update-weight-disk-dir /x has no effect with --update-weight-trans"),
        ({"update_weight_transfer_mode": "p2p"}, "p2p"),
    ],
)
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert expected in str(caught.value)


def test_through_a_folder(argv):
    config = resolve(argv(update_weight_transfer_mode="disk", update_weight_disk_dir="/x")).config
    assert (config.update_weight_transfer_mode, config.update_weight_disk_dir) == ("disk", "/x")
