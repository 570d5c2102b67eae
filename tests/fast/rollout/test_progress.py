from miles.rollout import progress as module
from miles.rollout.progress import Progress


class Bar:
    def __init__(self, desc, total, unit):
        self.shown, self.closed, self.total = 0, False, total
        bars.append(self)

    def update(self, count):
        self.shown += count

    def close(self):
        self.closed = True


bars = []


def test_only_a_long_generation_shows_a_bar(monkeypatch):
    monkeypatch.setattr(module.tqdm_ray, "tqdm", Bar)
    short = Progress("Rollout 0", 8)
    short.update(8)
    short.close()
    assert not bars
    monkeypatch.setattr(module, "SHOW_AFTER_SECONDS", -1.0)
    long = Progress("Rollout 1", 8)
    long.update(4)
    long.update(4)
    long.close()
    assert len(bars) == 1 and bars[0].shown == 8 and bars[0].total == 8 and bars[0].closed
