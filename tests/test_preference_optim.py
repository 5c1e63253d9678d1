"""Proves the two supervised losses, the learning-rate schedule and the optimiser.

Oracles: double-precision formulas from the standard library, stock cross_entropy, torch's own AdamW in
its plain (not fused) form, and AdamW written out in NumPy. Saved optimiser state is compared bit for
bit, and everything that does not fit is shown to be refused before a weight moves.
"""

import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernel.measure.pairs import pair_counts, pair_figures
from kernel.optim import Optimizer, learning_rate
from kernel.supervised import bradley_terry_loss, sft_loss

SETTINGS = {"warmup": 0.1, "final_lr": 0.1, "max_grad_norm": 1.0, "weight_decay": 0.01}


# --- Bradley-Terry --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "margin, loss, gradient",
    [(0.0, 0.693147, -0.5), (200.0, 0.0, 0.0), (-200.0, 200.0, -1.0), (1.0, 0.313262, -0.268941)],
)
def test_bradley_terry_by_hand(margin, loss, gradient):
    # case B39: -log(sigmoid(m)) = log(1 + exp(-m)), d/dm = -sigmoid(-m); two-step forms give inf
    chosen = torch.tensor([margin + 3]).requires_grad_()
    rejected = torch.tensor([3.0]).requires_grad_()
    have = bradley_terry_loss(chosen, rejected)
    have.backward()
    assert math.isclose(have.item(), loss, abs_tol=1e-5)
    assert math.isclose(chosen.grad.item(), gradient, abs_tol=1e-5)
    assert rejected.grad.item() == -chosen.grad.item()


def test_bradley_terry_averages_over_pairs_as_the_double_precision_formula_does():
    margins = torch.linspace(-6, 9, 8)
    want = sum(math.log1p(math.exp(-m)) for m in margins.tolist()) / 8
    assert math.isclose(bradley_terry_loss(margins + 1, torch.ones(8)).item(), want, abs_tol=1e-6)


def test_identical_answers_have_gradient_exactly_zero_through_a_shared_score():
    # case B39: the same answer on both sides teaches nothing
    torch.manual_seed(0)
    body, head = torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)
    answers = torch.randn(3, 6)

    def score(x):
        return head(torch.tanh(body(x)))[:, 0]

    loss = bradley_terry_loss(score(answers), score(answers.clone()))
    loss.backward()
    assert math.isclose(loss.item(), 0.693147, abs_tol=1e-6)
    for p in (*body.parameters(), *head.parameters()):
        assert (p.grad == 0).all()


def test_pair_accuracy_counts_ties_apart():
    # case B39: right, tied, wrong, right
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 4.0, 0.0])
    counts = {"pairs": 4, "right": 2, "ties": 1, "wrong": 1, "accuracy": 0.5}
    assert pair_counts(chosen, rejected) == counts
    rows = [
        {"id": str(n), "chosen_score": c, "rejected_score": r}
        for n, (c, r) in enumerate(zip(chosen.tolist(), rejected.tolist()))
    ]
    assert pair_figures(rows) == {"all": {**counts, "mean_margin": 0.5}}
    tied = pair_counts(torch.zeros(3), torch.zeros(3))
    assert tied["ties"] == 3 and tied["accuracy"] == 0.0


# --- SFT ------------------------------------------------------------------------------------------


def test_window_of_two_parts_divides_by_its_total_of_tokens():
    # case B24: sums 4 (1 token) and 3 (3 tokens): 7 / 4 = 1.75; a mean of means gives 2.5
    one = sft_loss(torch.tensor([[-4.0, -9.0, -9.0]]), torch.tensor([[True, False, False]]), 4)
    three = sft_loss(torch.tensor([[-1.0, -1.5, -0.5]]), torch.tensor([[True, True, True]]), 4)
    assert (one.item(), three.item()) == (1.0, 0.75)
    assert (one + three).item() == 1.75


def test_gradients_of_micro_batches_add_up_to_those_of_one_batch():
    # case B24
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, 5, generator=generator)  # rows, tokens, features
    targets = torch.randint(0, 11, (4, 6), generator=generator)
    lengths = torch.tensor([1, 6, 3, 2])
    mask = torch.arange(6)[None, :] < lengths[:, None]

    def gradient(parts):
        weight = torch.randn(11, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
        total = 0.0
        for rows in parts:
            logprobs = (inputs[rows] @ weight.T).log_softmax(-1)
            picked = logprobs.gather(2, targets[rows][..., None])[..., 0]
            loss = sft_loss(picked, mask[rows], int(lengths.sum()))
            loss.backward()
            total += loss.item()
        return total, weight

    whole, weight = gradient([[0, 1, 2, 3]])
    for parts in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]):
        total, micro = gradient(parts)
        assert math.isclose(total, whole, abs_tol=1e-6)
        torch.testing.assert_close(micro.grad, weight.grad, rtol=0, atol=1e-6)
    # the stock loss over all active tokens, ignored labels elsewhere
    stock = weight.detach().clone().requires_grad_()
    logits = (inputs @ stock.T).flatten(0, 1)
    want = F.cross_entropy(logits, targets.masked_fill(~mask, -100).flatten(), ignore_index=-100)
    want.backward()
    assert math.isclose(whole, want.item(), abs_tol=1e-6)
    torch.testing.assert_close(weight.grad, stock.grad, rtol=0, atol=1e-6)


def test_masked_token_of_probability_zero_leaves_the_sft_loss_alone():
    # case B30
    logprobs = torch.tensor([[-1.0, -math.inf]]).requires_grad_()
    loss = sft_loss(logprobs, torch.tensor([[True, False]]), 1)
    loss.backward()
    assert loss.item() == 1.0 and logprobs.grad.tolist() == [[-1.0, 0.0]]


# --- schedule -------------------------------------------------------------------------------------


def rates(total, warmup, final=0.1, peak=1.0):
    return [learning_rate(k, total, peak, warmup, final) for k in range(total)]


@pytest.mark.parametrize(
    "total, warmup, final, want",
    [
        (4, 3, 1.0, [1 / 3, 2 / 3, 1, 1]),  # case B36, as written there
        (4, 0, 1.0, [1, 1, 1, 1]),
        (4, 0, 0.1, [1, 0.7, 0.4, 0.1]),
        (4, 1, 0.1, [1, 0.7, 0.4, 0.1]),  # one warm-up update is already at the peak
        (6, 3, 0.1, [1 / 3, 2 / 3, 1, 0.7, 0.4, 0.1]),
        (4, 4, 0.1, [0.25, 0.5, 0.75, 1]),  # warm-up to the end: never falls
        (4, 8, 0.1, [0.125, 0.25, 0.375, 0.5]),  # longer than the run: never arrives
        (1, 0, 0.1, [1]),
        (1, 1, 0.1, [1]),
        (1, 3, 0.1, [1 / 3]),
        (2, 1, 0.1, [1, 0.1]),
    ],
)
def test_schedule_is_the_written_list(total, warmup, final, want):
    assert rates(total, warmup, final) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("total, warmup", [(63, 6), (105, 10), (200, 20), (210, 21), (10, 0)])
def test_last_update_runs_at_ten_percent_of_the_peak_and_the_first_one_moves(total, warmup):
    # case B36
    have = rates(total, warmup, peak=2e-4)
    assert have[-1] == pytest.approx(2e-5, rel=1e-9)
    assert have[0] > 0 and max(have) == pytest.approx(2e-4)
    after = have[max(warmup - 1, 0) :]
    assert all(a > b for a, b in zip(after, after[1:]))  # strictly down from the peak
    drops = [a - b for a, b in zip(after, after[1:])]
    assert drops == pytest.approx([drops[0]] * len(drops), rel=1e-6)  # and linear


# --- optimiser ------------------------------------------------------------------------------------


def new_named(names=("a", "b", "c"), dtype=torch.float32):
    """a and b have the same shape, so a swap of their moments would not show in the shapes."""
    shapes = {"a": (3, 2), "b": (3, 2), "c": (4,)}
    generator = torch.Generator().manual_seed(4)
    values = {n: torch.randn(shapes[n], generator=generator) for n in sorted(shapes)}
    return {n: torch.nn.Parameter(values[n].to(dtype)) for n in names}


def gradients(update: int) -> dict:
    generator = torch.Generator().manual_seed(100 + update)
    return {
        n: torch.randn(s, generator=generator) * 2
        for n, s in (("a", (3, 2)), ("b", (3, 2)), ("c", (4,)))
    }


def run(optimizer: Optimizer, first: int, last: int) -> list[dict]:
    """Updates first..last-1, each with gradients of its own."""
    lines = []
    for update in range(first, last):
        given = gradients(update)
        loss = sum((given[n] * p).sum() for n, p in optimizer.named.items())
        loss.backward()
        lines.append(optimizer.step(loss.detach(), f"update {update}"))
    return lines


def test_three_updates_equal_plain_torch_adamw_and_numpy_adamw():
    total, peak, decay, clip = 10, 0.05, 0.01, 1.0
    ours = Optimizer(new_named(), total, peak, SETTINGS)
    lines = run(ours, 0, 3)

    stock = new_named()
    adamw = torch.optim.AdamW(
        stock.values(), lr=peak, weight_decay=decay, fused=False, foreach=False
    )
    arrays = {n: p.detach().double().numpy().copy() for n, p in new_named().items()}
    first = {n: np.zeros_like(a) for n, a in arrays.items()}
    second = {n: np.zeros_like(a) for n, a in arrays.items()}
    for update in range(3):
        given = gradients(update)
        lr = peak if update == 0 else peak * (1 - 0.9 * update / 9)  # warm-up of one update
        assert lines[update]["lr"] == pytest.approx(lr, rel=1e-12)
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in given.values()))
        assert lines[update]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > clip  # the clip is at work in every update
        for name, p in stock.items():
            p.grad = given[name].clone()
        torch.nn.utils.clip_grad_norm_(stock.values(), clip)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        for name, a in arrays.items():
            g = given[name].double().numpy() * clip / (norm + 1e-6)
            a *= 1 - lr * decay
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g * g
            corrected = first[name] / (1 - 0.9 ** (update + 1))
            root = np.sqrt(second[name] / (1 - 0.999 ** (update + 1)))
            a -= lr * corrected / (root + 1e-8)
    for name, p in ours.named.items():
        torch.testing.assert_close(p, stock[name], rtol=0, atol=1e-7)
        # float32 weights of size 1 carry 1e-7 each; NumPy has no such rounding
        np.testing.assert_allclose(p.detach().double().numpy(), arrays[name], rtol=0, atol=1e-6)


def test_a_gradient_below_the_limit_is_not_clipped():
    ours = Optimizer(new_named(("c",)), 1, 0.1, {**SETTINGS, "weight_decay": 0.0})
    ours.named["c"].grad = torch.tensor([0.3, 0.0, 0.4, 0.0])
    line = ours.step(torch.tensor(1.0), "here")
    assert line["grad_norm"] == pytest.approx(0.5)
    moments = ours.state()["moments"]["c"]
    torch.testing.assert_close(moments["exp_avg"], torch.tensor([0.03, 0.0, 0.04, 0.0]))


def bits(optimizer: Optimizer) -> dict:
    moments = optimizer.state()["moments"]
    flat = {f"{n} {k}": v.clone() for n, m in moments.items() for k, v in m.items()}
    return flat | {n: p.detach().clone() for n, p in optimizer.named.items()}


def assert_same_bits(have: dict, want: dict):
    assert have.keys() == want.keys()
    for name in want:
        assert torch.equal(have[name], want[name]), name


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_stops_before_any_weight_changes_and_names_the_place(poison):
    # case B30: NaN put into one gradient at update 5
    ours = Optimizer(new_named(), 10, 0.05, SETTINGS)
    run(ours, 0, 5)
    before = bits(ours)
    for name, gradient in gradients(5).items():
        ours.named[name].grad = gradient
    ours.named["b"].grad[1, 1] = poison
    with pytest.raises(FloatingPointError, match=r"(?s)update 5, rows OH003.*first in b;"):
        ours.step(torch.tensor(1.0), "update 5, rows OH003")
    assert_same_bits(bits(ours), before)
    assert ours.updates == 5


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_stops_before_any_weight_changes_and_names_the_place(poison):
    # case B30: the gradients may look finite
    ours = Optimizer(new_named(), 10, 0.05, SETTINGS)
    run(ours, 0, 2)
    before = bits(ours)
    for name, gradient in gradients(2).items():
        ours.named[name].grad = gradient
    with pytest.raises(FloatingPointError, match="update 2"):
        ours.step(torch.tensor(poison), "update 2")
    assert_same_bits(bits(ours), before)
    assert ours.updates == 2


@pytest.mark.parametrize("stop", range(6))
def test_saved_state_restores_bit_for_bit_and_the_run_goes_on_unchanged(stop):
    # cases B13, B27, B36: at every stop point, also before the first update
    whole = Optimizer(new_named(), 6, 0.05, SETTINGS)
    lines = run(whole, 0, 6)

    part = Optimizer(new_named(), 6, 0.05, SETTINGS)
    run(part, 0, stop)
    file = io.BytesIO()
    torch.save(
        {"state": part.state(), "weights": {n: p.detach() for n, p in part.named.items()}}, file
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Optimizer(new_named(), 6, 0.05, SETTINGS)
    with torch.no_grad():
        for name, p in again.named.items():
            p.copy_(saved["weights"][name])
    again.load_state(saved["state"])
    assert_same_bits(bits(again), bits(part))
    assert again.updates == stop
    assert run(again, stop, 6) == lines[stop:]
    assert_same_bits(bits(again), bits(whole))


def test_loaded_state_is_a_copy():
    # case B27: training on must not reach back into the dictionary it came from
    first = Optimizer(new_named(), 6, 0.05, SETTINGS)
    run(first, 0, 2)
    state = first.state()
    kept = {k: v.clone() for k, v in state["moments"]["a"].items()}
    second = Optimizer(new_named(), 6, 0.05, SETTINGS)
    second.load_state(state)
    run(second, 2, 4)
    for key, want in kept.items():
        assert torch.equal(state["moments"]["a"][key], want), key


def trained_state() -> dict:
    optimizer = Optimizer(new_named(), 6, 0.05, SETTINGS)
    run(optimizer, 0, 2)
    return optimizer.state()


def test_state_in_another_parameter_order_is_refused():
    # case B27: a and b have equal shapes, torch would swap their moments without a word
    swapped = Optimizer(new_named(("b", "a", "c")), 6, 0.05, SETTINGS)
    with pytest.raises(ValueError, match="order"):
        swapped.load_state(trained_state())


def test_state_with_a_missing_or_an_extra_parameter_is_refused_and_named():
    # case B27
    state = trained_state()
    extra = {**state, "moments": {**state["moments"], "ghost": state["moments"]["a"]}}
    with pytest.raises(ValueError, match="ghost"):
        Optimizer(new_named(), 6, 0.05, SETTINGS).load_state(extra)
    state["moments"].pop("b")
    with pytest.raises(ValueError, match="'b'"):
        Optimizer(new_named(), 6, 0.05, SETTINGS).load_state(state)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_with_a_mis_shaped_or_cast_moment_is_refused_and_named(key):
    # case B27
    for change in (lambda m: m.reshape(2, 3), lambda m: m.bfloat16()):
        state = trained_state()
        state["moments"]["b"][key] = change(state["moments"]["b"][key])
        with pytest.raises(ValueError, match=f"{key} of b"):
            Optimizer(new_named(), 6, 0.05, SETTINGS).load_state(state)


@pytest.mark.parametrize("total, peak, word", [(7, 0.05, "total"), (6, 0.04, "peak")])
def test_state_of_another_schedule_is_refused_with_both_values(total, peak, word):
    # cases B27, B28
    saved, now = ("6", "7") if word == "total" else ("0.05", "0.04")
    with pytest.raises(ValueError, match=f"{word}.*{saved}.*{now}"):
        Optimizer(new_named(), total, peak, SETTINGS).load_state(trained_state())


def test_bfloat16_parameters_are_refused_by_name():
    # case B27: their moments would be bfloat16 too
    named = new_named()
    named["b"] = torch.nn.Parameter(named["b"].detach().bfloat16())
    with pytest.raises(ValueError, match=r"float32.*\bb\b"):
        Optimizer(named, 6, 0.05, SETTINGS)


def test_gradients_are_cleared_after_a_step():
    ours = Optimizer(new_named(), 6, 0.05, SETTINGS)
    run(ours, 0, 1)
    assert all(p.grad is None for p in ours.named.values())
