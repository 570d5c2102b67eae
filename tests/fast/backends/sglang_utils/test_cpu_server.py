import torch

from miles.backends.sglang_utils.cpu_server import draw


def test_draws_follow_the_distribution_and_depend_on_seed_and_position_only():
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log().expand(100_000, 5)
    seeds = torch.arange(100_000) * 7919 + 2**40
    ids = draw(log_probs, seeds, torch.full((100_000,), 17))
    shares = ids[:, 0].bincount(minlength=5)
    assert (shares / 100_000 - torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])).abs().max() < 0.006
    assert shares[4] == 0
    some = torch.randperm(100_000)[:50]
    assert torch.equal(draw(log_probs[some], seeds[some], torch.full((50,), 17)), ids[some])
    assert not torch.equal(draw(log_probs[some], seeds[some], torch.full((50,), 18)), ids[some])


def test_consecutive_positions_are_independent():
    log_probs = torch.full((50_000, 2), 0.5).log()
    seeds = torch.arange(50_000)
    first, second = (draw(log_probs, seeds, torch.full((50_000,), p))[:, 0].double() for p in (3, 4))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.02
