"""Every flag that names a function or class: what it raises, on import or when called, is an error that names it."""

import asyncio
import logging
import threading
import time
from contextlib import suppress

import pytest

from miles.config.run_config import RunConfig
from miles.rewards.compute import compute_rewards, load_reward
from miles.rollout.generate_hub import agentic_tool_call
from miles.rollout.hooks import load_generate, load_hooks
from miles.rollout.prompts.data_source import load_data_source, take_groups
from miles.rollout.sessions.tool_calls import ToolCall, execute, load_execute_tool, specs_of_path
from miles.training.custom import load_custom_loss, load_custom_tis
from miles.training.data_postprocess import load_data_postprocess
from miles.utils.dotted_path import load_function
from miles.utils.errors import UserError
from miles.utils.loop_watch import LoopWatch
from miles.utils.types import Sample
from miles.utils.user_code import FunctionFailed

MODULE = """
import asyncio
import time

from miles.rollout.prompts.data_source import DataSource

error = None

def plain(*arguments, **keywords):
    raise error

async def waits(*arguments, **keywords):
    raise error

async def begins_a_task_that_blocks():
    async def other():
        time.sleep(0.4)
    await asyncio.gather(other())

class Source(DataSource):
    def __init__(self, config, tokenizer): ...
    def get_samples(self, num_groups): raise error
    def state_dict(self): ...
    def load_state_dict(self, state): ...
    def __len__(self): ...
    longest_prompt = 1

class FailsAtOnce(Source):
    def __init__(self, config, tokenizer): raise error
"""
FILES = {"chat_template_path"}  # of these flags: not Python's


async def call_tool(config):
    tools = [{"function": {"name": "f"}}]
    (message,), failed = await execute(load_execute_tool(config), [ToolCall("id", "f", "{}")], tools, Sample())
    assert failed == 1 and message["content"].startswith("The call of f failed: ")
    raise FunctionFailed("--generate-execute-tool-function-path mine.waits failed: the model is told")


async def call_reward(config):
    counts = await compute_rewards(config, [Sample(index=1, group_index=0)])
    assert counts.errors == 1
    raise FunctionFailed(counts.first_error.removeprefix("sample 1 of group 0: "))


def with_hooks(call):
    return lambda config: call(load_hooks(config, None), config)


def at_once(load, count):
    """Calls what `load` returns with as many arguments."""
    return lambda config: load(config)(*range(count))


# By field: what of the module it names, and a call of it, which loads it first.
CALLS = {
    "rollout_function_path": ("plain", with_hooks(lambda hooks, config: hooks.rollout(config, 0, None))),
    "eval_function_path": ("waits", with_hooks(lambda hooks, config: hooks.evaluate(config, 0, None))),
    "custom_generate_function_path": (
        "waits",
        with_hooks(lambda hooks, config: hooks.generate.function(config, Sample(), {})),
    ),
    "dynamic_sampling_filter_path": ("plain", with_hooks(lambda hooks, config: hooks.keep_group(config, []))),
    "buffer_filter_path": ("plain", with_hooks(lambda hooks, config: hooks.take_from_buffer(config, 0, [], 1))),
    "rollout_sample_filter_path": ("plain", with_hooks(lambda hooks, config: hooks.filter_samples(config, []))),
    "rollout_all_samples_process_path": (
        "plain",
        with_hooks(lambda hooks, config: hooks.show_all_samples(config, [], None)),
    ),
    "custom_reward_post_process_path": ("plain", with_hooks(lambda hooks, config: hooks.shape_rewards(config, []))),
    "custom_convert_samples_to_train_data_path": (
        "plain",
        with_hooks(lambda hooks, config: hooks.make_batch(config, [], [], [])),
    ),
    "custom_rollout_log_function_path": (
        "plain",
        with_hooks(lambda hooks, config: hooks.log_rollout(config, 0, [], {}, 1.0)),
    ),
    "custom_eval_rollout_log_function_path": (
        "plain",
        with_hooks(lambda hooks, config: hooks.log_eval(config, 0, {}, {})),
    ),
    "rollout_data_postprocess_path": (
        "plain",
        at_once(lambda config: load_data_postprocess(config.rollout_data_postprocess_path), 4),
    ),
    "custom_loss_function_path": (
        "plain",
        at_once(lambda config: load_custom_loss(config.custom_loss_function_path), 5),
    ),
    "custom_tis_function_path": ("plain", at_once(lambda config: load_custom_tis(config.custom_tis_function_path), 5)),
    "data_source_path": ("Source", lambda config: take_groups(config, load_data_source(config, None), 1)),
    "custom_rm_path": ("waits", call_reward),
    "generate_execute_tool_function_path": ("waits", call_tool),
    "custom_agent_function_path": ("waits", at_once(agentic_tool_call._load_agent, 4)),
}
LOADS = dict.fromkeys(CALLS, lambda config: load_hooks(config, None)) | {
    "data_source_path": lambda config: load_data_source(config, None),
    "custom_rm_path": load_reward,
    "generate_execute_tool_function_path": load_execute_tool,
    "generate_tool_specs_path": specs_of_path,
    "custom_agent_function_path": lambda config: agentic_tool_call.check(config, None),
}
BROKEN = {
    "import sys\nsys.exit('no license')": "SystemExit: no license; .*broken.py:2",
    "import no_such_package": "No module named 'no_such_package'; .*broken.py:1",
    "def f(:": "SyntaxError: invalid syntax .*broken.py, line 1",
    "x = 1 / 0": "ZeroDivisionError: division by zero; .*broken.py:1",
    "": "module 'broken' has no attribute 'f'",
}


@pytest.fixture
def mine(monkeypatch, tmp_path):
    """A module of functions that raise its `error`."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import mine

    return mine


def with_function(engine_config, field, path):
    """A configuration in which it has that path."""
    return engine_config.model_copy(update={"rm_type": None if field == "custom_rm_path" else "exact", field: path})


def flag_of(field):
    return "--" + field.replace("_", "-")


def test_the_tables_are_whole():
    paths = {name for name in RunConfig.model_fields if name.endswith("_path")} - FILES
    assert paths == set(LOADS) == set(CALLS) | {"generate_tool_specs_path"}


@pytest.mark.parametrize("field", LOADS)
def test_what_fails_as_it_is_imported_is_one_sentence(engine_config, field, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    for number, (source, reason) in enumerate(BROKEN.items()):
        (tmp_path / f"{number}_broken.py").write_text(source)
        path = f"{number}_broken.f"
        with pytest.raises(
            UserError,
            match=f"^{flag_of(field)} {path}: can't be imported \\({reason}.*\\); give ".replace(
                "'broken'", f"'{number}_broken'"
            ),
        ):
            LOADS[field](with_function(engine_config, field, path))


@pytest.mark.parametrize("field", CALLS)
async def test_what_it_raises_names_it(engine_config, mine, field):
    name, call = CALLS[field]
    for error in (ValueError("boom"), SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError()):
        mine.error = error
        with pytest.raises(FunctionFailed, match=f"^{flag_of(field)} mine.{name} failed: "):
            result = call(with_function(engine_config, field, f"mine.{name}"))
            await result


async def test_an_error_of_a_data_sources_constructor_names_it(engine_config, mine):
    mine.error = SystemExit(2)
    with pytest.raises(FunctionFailed, match="^--data-source-path mine.FailsAtOnce failed: SystemExit: 2"):
        load_data_source(with_function(engine_config, "data_source_path", "mine.FailsAtOnce"), None)


async def test_the_path_of_an_evaluation_set_is_named_by_it(engine_config, mine):
    mine.error = SystemExit(2)
    with pytest.raises(FunctionFailed, match="^the set aime mine.waits failed: SystemExit"):
        await load_generate(engine_config, None, "mine.waits", "the set aime").function(None, None, None)


async def test_a_cancelled_call_is_no_failure(mine):
    started = asyncio.Event()

    async def waits():
        started.set()
        await asyncio.sleep(1000)

    mine.long = waits
    task = asyncio.create_task(load_function("--flag", "mine.long", is_async=True)())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# What blocks the event loop


async def test_what_blocks_the_loop_is_named(mine, caplog):
    function = load_function("--flag", "mine.begins_a_task_that_blocks", is_async=True)
    watch = LoopWatch(patience=0.1)
    with caplog.at_level(logging.WARNING):
        await function()
        await asyncio.sleep(0.3)
    watch.close()
    assert len(caplog.records) in (1, 2)  # at 0.1 s, and at 0.2 s if the machine is quick enough
    text = caplog.records[0].getMessage()
    assert "has stood still for 0 s in what --flag mine.begins_a_task_that_blocks names" in text
    assert "time.sleep(0.4)" in text


def test_a_loop_that_a_task_ended_ends_the_process(monkeypatch, caplog):
    """SystemExit of a task that a function of the user's began goes past everything that awaits it."""
    ended = threading.Event()
    monkeypatch.setattr("miles.utils.loop_watch._end_process", ended.set)

    async def go():
        watches.append(LoopWatch(patience=0.1))

        async def exits():
            raise SystemExit(2)

        await asyncio.gather(exits())

    watches = []
    loop = asyncio.new_event_loop()
    loop.create_task(go())

    def run():
        with suppress(SystemExit):
            loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    assert ended.wait(20) and not thread.is_alive()
    watches[0].close()
    loop.close()
    assert "the event loop has ended" in caplog.text


def test_a_thread_that_hangs_holds_nothing_up(mine):
    mine.hangs = lambda: time.sleep(20)
    start = time.monotonic()
    with pytest.raises(FunctionFailed, match="^--flag mine.hangs failed: it was not done within 0.05 s"):
        asyncio.run(load_function("--flag", "mine.hangs", is_async=None, limit_s=0.05)())
    assert time.monotonic() - start < 15
