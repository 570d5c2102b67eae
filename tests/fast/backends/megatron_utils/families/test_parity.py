"""Each family in data/ against transformers in its layouts, its controls, and what it refuses."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

from miles.backends.megatron_utils.families import family_for
from miles.utils.network import free_ports
from tests.fast.backends.megatron_utils.families import parity

NAMES = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "data")]))
TESTS = {name: importlib.import_module(f"{parity.DATA}.{name}").FAMILY for name in NAMES}
LAYOUTS = [
    pytest.param(name, layout, marks=[pytest.mark.slow] if layout in family.slow_layouts else [], id=f"{name}-{layout}")
    for name, family in TESTS.items()
    for layout in (*family.layouts, *family.slow_layouts)
]
CONTROLS = [
    pytest.param(name, what, id=f"{name}-{what}")
    for name, family in TESTS.items()
    for what in (*family.controls, *family.switches)
]
REFUSED = [pytest.param(*row, id=f"{name}-{row[-1]}") for name, family in TESTS.items() for row in family.refused]
LAYOUTS_REFUSED = [
    pytest.param(*row, id=f"{name}-{row[-1]}") for name, family in TESTS.items() for row in family.layouts_refused
]


@pytest.fixture(scope="module")
def measured(start_ranks, tmp_path_factory):
    """`measured(name, slow)`: what two ranks find of a family in one start; the next tests of the family have it."""
    folders: dict[str, Path] = {}
    results: dict[tuple[str, bool], dict | BaseException] = {}

    def measure(name: str, slow: bool) -> dict:
        family = TESTS[name]
        if name not in folders:
            folders[name] = parity.prepare(tmp_path_factory.mktemp(name), family)
            if family.finish is not None:
                family.finish(folders[name])
        layouts = family.slow_layouts if slow else family.layouts
        scratch = tmp_path_factory.mktemp(f"{name}-results")
        ports = free_ports(2 + len(layouts))
        task = {"family": name, "layouts": layouts, "controls": not slow, "ports": ports, "results": str(scratch)}
        start_ranks(scratch, parity.__file__, 2, str(folders[name]), json.dumps(task))
        found: dict = {"layouts": {}, "controls": {}}
        for part in (json.loads((scratch / f"{rank}.json").read_text()) for rank in range(2)):
            found["layouts"] |= part["layouts"]
            found["controls"] |= part["controls"]
        return found

    def cached(name: str, slow: bool) -> dict:
        if (name, slow) not in results:
            try:
                results[name, slow] = measure(name, slow)
            except pytest.fail.Exception as failure:
                results[name, slow] = failure
        result = results[name, slow]
        if isinstance(result, BaseException):
            raise result
        return result

    return cached


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_parity(measured, name, layout):
    family = TESTS[name]
    found = measured(name, layout in family.slow_layouts)["layouts"][layout]
    assert found.keys() >= set(family.only.get(layout, family.cases))
    for case, of_case in found.items():
        print(f"{case}: {parity.summary(of_case)}")
        assert of_case["weights_changed"] == [], f"{case}: not the same after there and back"
        assert max(of_case["packed"], of_case["padded"]) < family.log_prob_bound, f"{case}: {parity.summary(of_case)}"
        wrong = {weight: error for weight, error in of_case["gradients"].items() if not error < family.gradient_bound}
        assert wrong == {}, f"{case}: {parity.summary(of_case)}"


@pytest.mark.parametrize(("name", "what"), CONTROLS)
def test_what_is_wrong_on_purpose_is_seen(measured, name, what):
    error = measured(name, False)["controls"][what]
    print(f"{what}: {error:.1e}")
    assert error > TESTS[name].least, f"{what} makes no difference: {error}"


@pytest.mark.parametrize(("hf_config", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(hf_config, named):
    with pytest.raises(ValueError, match=named):
        family_for(hf_config)


@pytest.mark.parametrize(("hf_config", "sizes", "named"), LAYOUTS_REFUSED)
def test_layouts_that_are_refused(hf_config, sizes, named):
    family = family_for(hf_config)
    with pytest.raises(ValueError, match=named):
        family.check_layout(hf_config, sizes)


@pytest.mark.parametrize("name", TESTS)
def test_layouts_that_are_accepted(name):
    for hf_config, sizes in TESTS[name].layouts_accepted:
        family_for(hf_config).check_layout(hf_config, sizes)
