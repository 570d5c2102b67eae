import time

import psutil
import pytest

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.server_process import ServerDied

pytestmark = pytest.mark.real


def test_a_server_that_cannot_start_raises_with_its_log_and_is_gone(engine_config, tmp_path):
    config = engine_config.model_copy(update={"hf_checkpoint": str(tmp_path / "nothing"), "run_dir": str(tmp_path)})
    engine = SGLangEngine(config, 3, [])
    start = time.monotonic()
    with pytest.raises(ServerDied, match="exited with code 1") as caught:
        engine.start()
    assert time.monotonic() - start < 60
    assert "engine_3.log" in str(caught.value) and "nothing" in str(caught.value)
    assert not [p for p in psutil.Process().children(recursive=True) if str(tmp_path) in " ".join(p.cmdline())]
    engine.shutdown()
