"""One training loop: repeatable, resumable to the last bit, and stopping when it diverges."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from backbone.muon import Muon
from backbone.training import Recipe, fit, schedule, step_generator

RECIPE = Recipe(steps=24, batch_size=4, warmup=3, threads=1, save_every=5, report_every=4)


class Toy(torch.nn.Module):
    """Matrices inside ``layers`` (Muon's) and the rest (AdamW's)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        self.head = torch.nn.Linear(6, 6)
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            weight.data = 0.4 * torch.randn(weight.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Killed(Exception):
    """Stands in for a process that dies."""


def loss_until(dies_at: int | None = None, nan_from: int | None = None):
    def loss(model, step, generator):
        if step == dies_at:
            raise Killed
        x = torch.randn(4, 6, generator=generator)
        value = (model(x) - x.roll(1, dims=1)).square().mean()
        return value * (float("nan") if nan_from is not None and step >= nan_from else 1.0), 24

    return loss


def train(folder, recipe: Recipe = RECIPE, **trouble) -> Toy:
    model = Toy()
    fit(model, loss_until(**trouble), recipe, folder, "toy")
    return model


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def metrics(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "gradient_norm")} for line in lines]


def test_training_learns_and_repeats_exactly(tmp_path):
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert torch.equal(weights(first), weights(second))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(9))
    before, after = ((model(x) - x.roll(1, dims=1)).square().mean() for model in (Toy(), first))
    assert after < before
    assert not torch.equal(weights(first), weights(Toy()))
    other_seed = train(tmp_path / "c", Recipe(**{**RECIPE.__dict__, "seed": 2}))
    assert not torch.equal(weights(first), weights(other_seed))


@pytest.mark.parametrize("dies_at", [2, 5, 13, 23])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, dies_at, capsys):
    wanted = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "killed", dies_at=dies_at)
    resumed = train(tmp_path / "killed")
    assert torch.equal(weights(resumed), weights(wanted))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "killed")] == [4, 8, 12, 16, 20, 24]
    saved = dies_at // 5 * 5
    assert (f"resumed at step {saved} of 24" in capsys.readouterr().err) == (saved > 0)


def test_killed_twice(tmp_path):
    for dies_at in (8, 19):
        with pytest.raises(Killed):
            train(tmp_path / "killed", dies_at=dies_at)
    assert torch.equal(weights(train(tmp_path / "killed")), weights(train(tmp_path / "whole")))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_resuming_needs_the_optimizers_state(tmp_path):
    """Negative control: weights alone are not enough, so the comparison above is not vacuous."""
    with pytest.raises(Killed):
        train(tmp_path / "killed", dies_at=13)
    state = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)
    for part in state["parts"][:2]:
        part["state"] = {}
    torch.save(state, tmp_path / "killed" / "state.pt")
    assert not torch.equal(weights(train(tmp_path / "killed")), weights(train(tmp_path / "whole")))


def test_a_half_written_metrics_line_does_not_stop_a_resumed_run(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path / "killed", dies_at=13)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    train(tmp_path / "killed")
    assert [line["step"] for line in metrics(tmp_path / "killed")] == [4, 8, 12, 16, 20, 24]


def test_a_loss_that_is_not_finite_names_step_and_state(tmp_path):
    with pytest.raises(FloatingPointError, match=r"toy: the loss is nan at step 12, .*state\.pt \(step 10\)"):
        train(tmp_path, nan_from=10)


@pytest.mark.parametrize("nan_from", [6, 7, 9])
def test_a_poisoned_state_is_never_saved(tmp_path, nan_from):
    """The loss turns NaN between two reports, just before a state would be saved."""
    recipe = Recipe(**{**RECIPE.__dict__, "report_every": 24})
    with pytest.raises(FloatingPointError, match=r"\(step 5\)"):
        train(tmp_path, recipe, nan_from=nan_from)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 5
    assert all(bool(weight.isfinite().all()) for weight in state["model"].values())


def test_without_muon_everything_is_adamw(tmp_path):
    recipe = Recipe(**{**RECIPE.__dict__, "muon_rate": 0.0})
    with pytest.raises(Killed):
        train(tmp_path / "killed", recipe, dies_at=13)
    assert torch.equal(weights(train(tmp_path / "killed", recipe)), weights(train(tmp_path / "whole", recipe)))


def test_schedule_rises_then_falls_to_its_floor():
    recipe = Recipe(steps=100, warmup=10, floor=0.1)
    rates = [schedule(recipe)(step) for step in range(101)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == 1.0 and rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert schedule(Recipe(steps=5, warmup=0, floor=1.0))(3) == 1.0


def test_step_generators_differ_by_seed_and_step():
    """torch drops all but the low 32 bits of a seed, so a seed in the high ones would have no effect."""
    drawn = [torch.rand(1, generator=step_generator(seed, step)).item() for seed in range(50) for step in range(50)]
    assert len(set(drawn)) > 2490  # of 2500 numbers with 24 bits, a few may collide
    drawn = [torch.rand(1, generator=step_generator(1, 0)).item()]
    assert drawn[0] == torch.rand(1, generator=step_generator(1, 0)).item()


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch_size": 0}, {"threads": 0}, {"save_every": 0}, {"report_every": -1}, {"clip": -1.0},
     {"learning_rate": float("nan")}, {"muon_rate": float("inf")}, {"floor": -0.1}],
)  # fmt: skip
def test_bad_recipes_are_refused_with_their_name(wrong):
    with pytest.raises(ValueError, match=f"training.{next(iter(wrong))} is"):
        Recipe(**{"steps": 10, **wrong})


def test_muon_takes_the_steps_of_torch_without_its_rounding():
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 12), (20, 12), (12, 20), (12, 12)]
    begun = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in begun] for _ in range(2))
    engines = [
        Muon(ours, lr=5e-3),
        torch.optim.Muon(theirs, lr=5e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(10):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator) + mine.detach()
            other.grad = mine.grad.clone()
        for engine in engines:
            engine.step()
    for mine, other, before in zip(ours, theirs, begun, strict=True):
        assert (mine - other).norm() < 0.02 * (other - before).norm()  # bfloat16 has 8 bits
