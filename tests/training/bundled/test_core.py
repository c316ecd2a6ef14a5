"""Optimiser, training loop and checkpoints, on small problems with known answers."""

import json
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from patchedserve.data.errors import RunError, UsageError
from patchedserve.training.bundled.loop import LoopConfig, TrainingRun
from patchedserve.training.bundled.optim import MuonAdamW, OptimConfig, hidden_matrices, orthogonalised


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def is_outer(name):
    return name.startswith(("0.", "4."))


def loss_for(model):
    """Return the loss of a regression whose batch depends on the step alone."""

    def loss_of(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 4, generator=generator)
        y = torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)
        return nn.functional.mse_loss(model(x), y), {"extra": 1.0}

    return loss_of


def train(folder, config, loss_of=loss_for, **options):
    """Train a new net to the end of `config`, or continue the folder's run; return the net."""
    model = small_net()
    TrainingRun(model, config, folder, is_outer).run(loss_of(model), **options)
    return model


def interrupt_after(last_step):
    """Return an `on_step` that stops the run after `last_step`, as Ctrl-C does between two steps."""

    def interrupt(step, figures):
        if step == last_step:
            raise KeyboardInterrupt

    return interrupt


def assert_resumed_is_whole(folder, config, expected_step):
    """Check that the folder's run, interrupted after `expected_step`, ends exactly like an uninterrupted one."""
    whole = train(folder.with_name("whole"), config)
    resumed = small_net(seed=5)
    run = TrainingRun(resumed, config, folder, is_outer)
    assert run.step == expected_step
    run.run(loss_for(resumed))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(3, 24, 48), (2, 40, 12), (1, 12, 40)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_hidden_matrices_skips_excluded_parameters_and_non_matrices():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(3, 3, 3), nn.Embedding(5, 4))
    assert hidden_matrices(model, lambda name: name == "0.weight") == ["2.weight"]


def test_adamw_part_equals_torch():
    ours, theirs = small_net(), small_net()
    config = OptimConfig(adam_lr=0.01, weight_decay=0.0, clip_norm=1e9)
    mine = MuonAdamW(dict(ours.named_parameters()), [], config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=config.betas, weight_decay=0.0)
    for step in range(5):
        for model in (ours, theirs):
            loss_for(model)(step)[0].backward()
        mine.step(1.0)
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_and_their_norm_reported():
    model = small_net()
    optimiser = MuonAdamW(dict(model.named_parameters()), [], OptimConfig(clip_norm=0.5))
    (loss_for(model)(0)[0] * 1000).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert optimiser.step(0.0) == pytest.approx(float(expected), rel=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_training_learns_and_the_learning_rate_falls_to_zero(tmp_path):
    model = small_net()
    config = LoopConfig(400, warmup_steps=10, ema_decay=0.98, optim=OptimConfig(muon_lr=0.02, adam_lr=0.02))
    first, last = [], []
    run = TrainingRun(model, config, tmp_path, is_outer)
    run.run(loss_for(model), on_step=lambda step, f: (first if step <= 20 else last).append(f["loss"]))
    assert sum(last[-20:]) / 20 < 0.1 * sum(first) / len(first)
    assert config.lr_scale(0) == pytest.approx(0.1)
    assert config.lr_scale(200) == 1.0
    assert config.lr_scale(399) < 1e-3
    averaged = small_net(1)
    run.copy_ema_to(averaged)
    assert float(loss_for(averaged)(999)[0].detach()) < 0.1 * first[0]
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").open()][-1] == 400


def test_interrupted_run_ends_exactly_like_an_uninterrupted_one(tmp_path):
    config = LoopConfig(30, warmup_steps=3, ema_decay=0.9)

    def interrupted_loss_for(model):
        original = loss_for(model)

        def interrupted(step):
            if step == 17:
                raise KeyboardInterrupt
            return original(step)

        return interrupted

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", config, interrupted_loss_for)
    assert_resumed_is_whole(tmp_path / "broken", config, expected_step=17)


def test_finished_run_is_extended_from_before_its_decay(tmp_path):
    train(tmp_path, LoopConfig(20))
    longer = TrainingRun(small_net(), LoopConfig(40), tmp_path, is_outer)
    assert longer.step == LoopConfig(20).decay_start == 13
    same = TrainingRun(small_net(), LoopConfig(20), tmp_path, is_outer)
    assert same.step == 20


def test_interrupt_during_an_update_waits_for_its_end(tmp_path, monkeypatch):
    config = LoopConfig(30, warmup_steps=3, ema_decay=0.9)
    broken = small_net()
    run = TrainingRun(broken, config, tmp_path / "broken", is_outer)
    adam_step = run.optimiser._adam_step

    def interrupted(lr):
        if run.step == 17:
            signal.raise_signal(signal.SIGINT)
        adam_step(lr)

    monkeypatch.setattr(run.optimiser, "_adam_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run(loss_for(broken))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_resumed_is_whole(tmp_path / "broken", config, expected_step=18)


def test_run_interrupted_at_decay_start_can_be_extended(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, LoopConfig(20), on_step=interrupt_after(13))
    train(tmp_path, LoopConfig(20))
    assert TrainingRun(small_net(), LoopConfig(40), tmp_path, is_outer).step == 13


def test_shortened_run_can_be_extended_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, LoopConfig(100), on_step=interrupt_after(30))
    train(tmp_path, LoopConfig(40))
    assert TrainingRun(small_net(), LoopConfig(100), tmp_path, is_outer).step == 30


def test_decayed_run_without_its_earlier_checkpoint_is_not_restarted(tmp_path):
    train(tmp_path, LoopConfig(20))
    (tmp_path / "stable.safetensors").unlink()
    with pytest.raises(UsageError, match="no checkpoint from before that is left"):
        TrainingRun(small_net(), LoopConfig(40), tmp_path, is_outer)


def test_requesting_fewer_steps_does_not_damage_a_longer_run(tmp_path):
    train(tmp_path, LoopConfig(20))
    before = (tmp_path / "last.safetensors").read_bytes()
    with pytest.raises(UsageError, match="is at step 13 already, but 5 steps are asked for"):
        TrainingRun(small_net(), LoopConfig(5), tmp_path, is_outer)
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    TrainingRun(small_net(), LoopConfig(3), tmp_path, is_outer).save("last")
    with pytest.raises(UsageError, match="seed 0 -> 1"):
        TrainingRun(small_net(), LoopConfig(3, seed=1), tmp_path, is_outer)


def test_a_truncated_checkpoint_is_named(tmp_path):
    TrainingRun(small_net(), LoopConfig(3), tmp_path, is_outer).save("last")
    path = tmp_path / "last.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"last\.safetensors is not a whole checkpoint"):
        TrainingRun(small_net(), LoopConfig(3), tmp_path, is_outer)


def test_a_diverging_loss_stops_the_run(tmp_path):
    model = small_net()
    with pytest.raises(RunError, match="became nan at step 0"):
        TrainingRun(model, LoopConfig(3), tmp_path, is_outer).run(
            lambda step: (model(torch.full((1, 4), torch.nan)).sum(), {})
        )


def test_non_finite_gradient_changes_nothing():
    model = small_net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = MuonAdamW(dict(model.named_parameters()), ["2.weight"], OptimConfig())
    loss_for(model)(0)[0].backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient[0, 0] = torch.nan
    with pytest.raises(RunError, match="norm became nan"):
        optimiser.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_invalid_checkpoint_file_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "last.safetensors")
    with pytest.raises(RunError, match=r"last\.safetensors is not a checkpoint"):
        TrainingRun(small_net(), LoopConfig(3), tmp_path, is_outer)


def test_steps_must_be_positive():
    with pytest.raises(UsageError, match="at least 1"):
        LoopConfig(0)
