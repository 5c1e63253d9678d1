"""Proves the adapters: their arithmetic, what they train, what they refuse, and their files.

Oracles: PEFT on the same weights (logits and every gradient), plain autograd for the hand-written
backward, numbers by hand for the scale. Once per architecture where the architecture matters.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import LAYERS
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from kernel.data.base import load_base
from kernel.fast.merged import LoRAFunction, Prepacked, packs_bfloat16
from kernel.fast.transformer import Cache
from kernel.lora import PROJECTIONS, LoRALinear, add_lora
from kernel.roles import (
    Role,
    check_isolation,
    fingerprint,
    load_adapter,
    make_role,
    save_adapter,
)
from kernel.score import make_batch, response_logprobs

CPU = torch.device("cpu")
IDS = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(9))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- against PEFT ---------------------------------------------------------------------------------


def test_logits_and_all_gradients_equal_peft(model_dir, new_role):
    role = new_role(model_dir)
    stock = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    settings = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, bias="none", target_modules=list(PROJECTIONS)
    )
    peft = get_peft_model(stock, settings).eval()
    twins = {}  # our name -> PEFT's parameter
    for name, p in peft.named_parameters():
        if "lora_" in name:
            ours = name.replace("base_model.model.", "lm.")
            ours = ours.replace(".lora_A.default.weight", ".A").replace(
                ".lora_B.default.weight", ".B"
            )
            twins[ours] = p
            p.data.copy_(role.learned()[ours].data)
    assert twins.keys() == role.learned().keys()

    weights = torch.randn(2, 11, 97, generator=generator(1)) / 100
    ours, theirs = role.lm(IDS).logits, peft(IDS).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for name, p in role.learned().items():
        assert p.grad.abs().max() > 1e-4, name  # every adapter is on the path
        torch.testing.assert_close(p.grad, twins[name].grad, rtol=0, atol=1e-5, msg=name)


def test_logits_equal_the_stock_model_with_the_update_written_into_its_weights(
    model_dir, new_role, stock_model
):
    role = new_role(model_dir)
    torch.testing.assert_close(
        role.lm(IDS).logits, stock_model(model_dir, role)(IDS).logits, rtol=0, atol=1e-4
    )


# --- the layer ------------------------------------------------------------------------------------


def test_update_is_exactly_two_times_b_a_for_r_8_alpha_16():
    # case B14: x = 1, A = 1 over 4 inputs, B = 0.25 over r = 8: B A x = 8 * 4 * 0.25 = 8, scaled 16
    base = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(base.weight)
    layer = LoRALinear(base, 8, 16, generator(0))
    assert layer.scale == 2.0
    with torch.no_grad():
        layer.A.fill_(1.0)
        layer.B.fill_(0.25)
    assert layer(torch.ones(1, 4)).tolist() == [[16.0, 16.0, 16.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_untrained_adapters_return_the_base_model_bit_for_bit(model_dir, new_role, dtype):
    # case B14: B = 0
    role = new_role(model_dir, trained=False, base_dtype=dtype)
    assert torch.equal(role.lm(IDS).logits, load_base(model_dir, dtype)(IDS).logits)
    for layer in role.transformer.layers:  # and so does the way that the stages go
        for merged, stacked in zip(layer[:4], layer.stacked()[:4]):
            x = torch.randn(5, merged.weight.shape[1], generator=generator(1)).to(role.lm.dtype)
            bare = F.linear(x, merged.weight, merged.bias)
            assert torch.equal(merged(x), bare)
            assert torch.equal(stacked(x), stacked.base(x))
            # in bfloat16 the weights are prepacked: another order of summation on some processors
            rtol = 2**-7 if dtype == "bfloat16" else 0
            torch.testing.assert_close(stacked(x), bare, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "rows, width, out", [(1, 1, 1), (3, 33, 17), (4, 576, 96), (16, 200, 1000)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_prepacked_weights_give_the_twins_product(rows, width, out, bias):
    make = generator(rows)
    weight, b, x = (
        torch.randn(shape, generator=make) for shape in ((out, width), (out,), (rows, width))
    )
    for dtype in (torch.bfloat16, torch.float32):
        w, b_or_none, rows_of_x = weight.to(dtype), b.to(dtype) if bias else None, x.to(dtype)
        have, twin = Prepacked(w, b_or_none)(rows_of_x), F.linear(rows_of_x, w, b_or_none)
        assert have.dtype == dtype
        exact = F.linear(*(None if t is None else t.double() for t in (rows_of_x, w, b_or_none)))
        if dtype == torch.float32:
            assert torch.equal(have, twin)  # the twin itself
        # one rounding to eight bits, at most one unit from the twin's, of a sum in float32
        torch.testing.assert_close(have.double(), exact, rtol=2**-8, atol=1e-4)
        torch.testing.assert_close(have, twin, rtol=2**-7, atol=1e-4)


def test_decoding_reads_prepacked_weights_where_the_processor_can(model_dir, new_role):
    role = new_role(model_dir, base_dtype="bfloat16")
    cache = Cache(role.transformer, 2, 8)
    ways = [way.base for layer in cache.layers for way in layer[:4]] + [cache.head]
    assert [way.packed is not None for way in ways] == [packs_bfloat16()] * (4 * LAYERS + 1)
    again = Cache(role.transformer, 1, 4)  # packed once per role, not per rollout
    assert [way.base for layer in again.layers for way in layer[:4]] + [again.head] == ways


def merged(layers: list[LoRALinear], x: torch.Tensor) -> torch.Tensor:
    """Several layers on one input through the hand-written function."""
    bases = [layer.base for layer in layers]
    weight = torch.cat([base.weight for base in bases])
    bias = None if bases[0].bias is None else torch.cat([base.bias for base in bases])
    adapters = [p for layer in layers for p in (layer.A, layer.B)]
    return LoRAFunction.apply(x, weight, bias, layers[0].scale, *adapters)


@pytest.mark.parametrize("widths", [[10], [10, 6, 6]], ids=["one", "three of unequal width"])
@pytest.mark.parametrize("bias", [False, True])
def test_hand_written_backward_equals_autograd_in_float32(widths, bias):
    layers = []
    for seed, width in enumerate(widths):
        base = nn.Linear(12, width, bias=bias).requires_grad_(False)
        layers.append(LoRALinear(base, 4, 8, generator(seed)))
        layers[-1].B.data.normal_(generator=generator(10 + seed))
    x = torch.randn(5, 12, generator=generator(2))
    weights = torch.randn(5, sum(widths), generator=generator(3))
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    learned = [p for layer in layers for p in (layer.A, layer.B)]

    ours = merged(layers, x1)
    plain = torch.cat([layer(x2) for layer in layers], 1)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
    have = torch.autograd.grad((ours * weights).sum(), [x1, *learned])
    want = torch.autograd.grad((plain * weights).sum(), [x2, *learned])
    for mine, theirs in zip(have, want):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_hand_written_backward_passes_a_numerical_gradient_check():
    x, A, B = (
        torch.randn(s, generator=generator(5), dtype=torch.float64)
        .float()
        .double()
        .requires_grad_()
        for s in ((3, 6), (2, 6), (5, 2))
    )
    weight = torch.randn(5, 6, generator=generator(6), dtype=torch.float64)

    def plain(x, A, B):  # the one-line twin in double precision
        return x @ weight.T + 2.0 * ((x @ A.T) @ B.T)

    assert torch.autograd.gradcheck(plain, (x, A, B))
    up = torch.randn(3, 5, generator=generator(7), dtype=torch.float64)
    wanted = torch.autograd.grad((plain(x, A, B) * up).sum(), (x, A, B))
    x32, A32, B32 = (v.detach().float().requires_grad_() for v in (x, A, B))
    out = LoRAFunction.apply(x32, weight.float(), None, 2.0, A32, B32)
    have = torch.autograd.grad((out * up.float()).sum(), (x32, A32, B32))
    for mine, exact in zip(have, wanted):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_hand_written_backward_equals_autograd_in_bfloat16_within_two_roundings():
    # A bfloat16 number carries 8 bits: one rounding is at most 2^-8 of its size. The two forms add
    # the base's and the adapter's gradient of x before or after such a rounding: two of them.
    base = nn.Linear(64, 48).bfloat16().requires_grad_(False)
    layer = LoRALinear(base, 8, 16, generator(0))
    with torch.no_grad():
        layer.B.normal_(0, 0.2, generator=generator(1))
    x = torch.randn(30, 64, generator=generator(2)).bfloat16()
    weights = torch.randn(30, 48, generator=generator(3)).bfloat16()
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, plain = merged([layer], x1), layer(x2)
    assert ours.dtype == torch.bfloat16 and layer.A.dtype == layer.B.dtype == torch.float32

    def near(have, want, roundings):
        bound = roundings * 2**-8 * want.float().abs().max()
        assert (have.float() - want.float()).abs().max() <= bound

    near(ours, plain, 1)
    learned = [layer.A, layer.B]
    have = torch.autograd.grad((ours * weights).sum(), [x1, *learned])
    want = torch.autograd.grad((plain * weights).sum(), [x2, *learned])
    near(have[0], want[0], 2)
    for mine, theirs in zip(have[1:], want[1:]):  # FP32 in both forms
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_first_a_is_kaiming_uniform_and_b_is_zero():
    base = nn.Linear(400, 30)
    layer = LoRALinear(base, 8, 16, generator(0))
    # kaiming_uniform_ with a = sqrt(5): sqrt(6 / ((1 + 5) * fan_in)) = 1 / sqrt(400) = 0.05
    assert layer.A.abs().max() <= 0.05
    assert layer.A.abs().max() > 0.049 and abs(layer.A.mean()) < 0.005
    assert abs(layer.A.std() - 0.05 / math.sqrt(3)) < 0.001
    assert (layer.B == 0).all()


def test_same_seed_gives_the_same_adapters_and_another_seed_other_ones(model_dir, new_role):
    first, again, other = (
        new_role(model_dir, seed=s, trained=False).learned_state() for s in (49, 49, 50)
    )
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    values = [t for n, t in first.items() if n.endswith(".A")]
    assert not torch.equal(values[0], values[1])  # not one draw copied into every layer


def test_a_role_does_not_depend_on_the_global_random_state(llama_dir, new_role):
    # case B38
    made = []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            made.append(new_role(llama_dir, "reward", head="normal", trained=False).learned_state())
    assert fingerprint(made[0]) == fingerprint(made[1])


# --- what is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, "normal", "zero"])
def test_only_a_b_and_the_head_are_trained(model_dir, new_role, head):
    # case B15: 2 * 7 * layers tensors, plus weight and bias of the head
    role = new_role(model_dir, "any", head=head, trained=False)
    assert len(role.learned()) == 2 * 7 * 2 + (2 if head else 0)
    open_names = {n for n, p in role.named_parameters() if p.requires_grad}
    assert open_names == set(role.learned())
    assert all(p.dtype == torch.float32 for p in role.learned().values())
    assert not role.training and not any(m.training for m in role.modules())


def test_counts_are_seven_projections_per_layer_and_d_plus_one_head_numbers(model_dir, new_role):
    # widths: q and o 32 <-> 4 heads of 8, k and v 32 -> 2 of them, MLP 32 <-> 64; r (in + out) each
    head = 16 if model_dir.name == "qwen3" else 8
    per_layer = 8 * (2 * (32 + 4 * head) + 2 * (32 + 2 * head) + 3 * (32 + 64))
    learned = new_role(model_dir, "reward", head="normal").learned()
    assert sum(name.endswith(".A") for name in learned) == 14
    assert sum(learned.pop(f"head.{name}").numel() for name in ("weight", "bias")) == 33
    assert sum(p.numel() for p in learned.values()) == 2 * per_layer


def test_heads_start_as_specified(model_dir, new_role):
    zero = new_role(model_dir, "critic", head="zero", trained=False).head
    normal = new_role(model_dir, "reward", head="normal", trained=False).head
    assert (zero.weight == 0).all() and (zero.bias == 0).all() and (normal.bias == 0).all()
    assert 0.01 < normal.weight.std() < 0.03  # N(0, 0.02) over 32 numbers


def test_roles_that_share_a_tensor_are_refused(model_dir, new_role):
    # case B03
    actor, reference = new_role(model_dir), new_role(model_dir, "reference").freeze()
    check_isolation([actor, reference])
    assert not any(p.requires_grad for p in reference.parameters())
    with pytest.raises(ValueError, match="shares memory with role 'actor'"):
        check_isolation([actor, Role("reference", actor.lm, None)])


@pytest.mark.parametrize("way", ["stock", "ours"])
def test_one_update_moves_every_b_and_no_base_tensor(model_dir, new_role, way):
    # case B15
    role = new_role(model_dir, trained=False)
    base = {n: t.detach().clone() for n, t in role.base().items()}
    learned = role.learned_state()
    optimizer = torch.optim.AdamW(role.learned().values(), lr=0.01)
    if way == "stock":
        role.lm(IDS, labels=IDS).loss.backward()
    else:
        batch = make_batch(zip(IDS[:, :5].tolist(), IDS[:, 5:].tolist()), 0, CPU)
        response_logprobs(role, batch).sum().backward()
    optimizer.step()
    for name, want in base.items():
        assert torch.equal(role.base()[name], want), name
    for name, p in role.learned().items():
        if name.endswith(".B"):
            assert not torch.equal(p, learned[name]), name


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    )


def test_model_without_the_projections_is_refused_with_wanted_and_found_modules():
    # case B15: fused projections, as in GPT-2
    with pytest.raises(ValueError) as error:
        add_lora(gpt2(), 8, 16, 0)
    for word in (*PROJECTIONS, "0 modules", "lm_head"):
        assert word in str(error.value)


def test_folder_of_an_unsupported_architecture_is_refused_before_it_loads(tmp_path, role_config):
    # case B15
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*LlamaForCausalLM.*q/k/v/o_proj"):
        make_role("actor", role_config(tmp_path), CPU, 0)


def test_model_with_one_projection_missing_is_refused(llama_dir):
    # case B15: not all 7 everywhere
    lm = load_base(llama_dir, "float32")
    lm.model.layers[1].mlp.up_proj = nn.Identity()
    with pytest.raises(ValueError, match="matched 13 modules"):
        add_lora(lm, 8, 16, 0)


# --- adapter files --------------------------------------------------------------------------------

BASE = "b" * 64


@pytest.fixture
def saved(tmp_path, llama_dir, new_role, role_config):
    """A trained reward role and its file."""
    role = new_role(llama_dir, "reward", head="normal")
    path = tmp_path / "reward.safetensors"
    save_adapter(path, role, role_config(llama_dir), BASE)
    return role, path, role_config(llama_dir)


def test_adapter_file_restores_every_bit(saved, llama_dir, new_role):
    # case B04: another seed, so that nothing can be right by chance
    role, path, config = saved
    other = new_role(llama_dir, "reward", head="normal", seed=77)
    assert fingerprint(other.learned_state()) != fingerprint(role.learned_state())
    load_adapter(path, other, config, BASE)
    assert other.learned().keys() == role.learned().keys()
    for name, p in role.learned().items():
        assert torch.equal(other.learned()[name], p), name
    assert torch.equal(other.lm(IDS).logits, role.lm(IDS).logits)


def test_adapter_file_holds_the_learned_numbers_and_nothing_else(
    saved, qwen2_dir, new_role, tmp_path
):
    # case B47: also with tied embeddings; 8 bytes length, the header, 4 bytes per number
    role, path, config = saved
    tied = new_role(qwen2_dir, "critic", head="zero")
    save_adapter(tmp_path / "tied.safetensors", tied, config, BASE)
    for owner, file in ((role, path), (tied, tmp_path / "tied.safetensors")):
        raw = file.read_bytes()
        numbers = sum(p.numel() for p in owner.learned().values())
        assert len(raw) == 8 + int.from_bytes(raw[:8], "little") + 4 * numbers
        with safe_open(file, framework="pt") as opened:
            assert set(opened.keys()) == set(owner.learned())


def test_same_adapters_give_the_same_bytes(saved, tmp_path):
    role, path, config = saved
    for number in range(3):
        again = tmp_path / f"again{number}.safetensors"
        save_adapter(again, role, config, BASE)
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("key, value", [("lora_alpha", 32), ("lora_r", 4)])
def test_adapter_of_another_scale_is_refused_with_both_values(saved, key, value):
    # case B14
    role, path, config = saved
    with pytest.raises(ValueError, match=f"{key} is {config[key]}, this run has {value}"):
        load_adapter(path, role, {**config, key: value}, BASE)


def test_adapter_of_another_base_is_refused(saved):
    role, path, config = saved
    with pytest.raises(ValueError, match="base_sha256"):
        load_adapter(path, role, config, "c" * 64)


A_NAME, B_NAME = "lm.model.layers.1.mlp.up_proj.A", "lm.model.layers.0.self_attn.q_proj.B"


def swap(state, name, value):
    state[name] = value


FAULTS = {
    "head-missing": (lambda s: s.pop("head.weight"), "missing head.weight"),
    "adapter-missing": (lambda s: s.pop(B_NAME), f"missing {B_NAME}"),
    "extra": (lambda s: swap(s, "ghost.A", torch.ones(2)), "unexpected ghost.A"),
    "renamed": (lambda s: swap(s, "x.A", s.pop(A_NAME)), f"missing {A_NAME}; unexpected x.A"),
    "mis-shaped": (lambda s: swap(s, A_NAME, s[A_NAME][:4].clone()), rf"{A_NAME} is \(4, 32\)"),
    "empty": (lambda s: swap(s, A_NAME, s[A_NAME][:0].clone()), rf"{A_NAME} is \(0, 32\)"),
    "cast": (lambda s: swap(s, A_NAME, s[A_NAME].bfloat16()), f"{A_NAME} is .*bfloat16"),
    "nan": (lambda s: s[B_NAME][3].fill_(math.nan), f"{B_NAME} holds non-finite"),
    "inf": (lambda s: s["head.bias"].fill_(math.inf), "head.bias holds non-finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_adapter_file_that_does_not_fit_is_refused_by_name_and_changes_nothing(saved, fault):
    # cases B04, B30
    role, path, config = saved
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    state = load_file(path)
    edit, message = FAULTS[fault]
    edit(state)
    save_file(state, path, metadata=metadata)
    before = fingerprint(role.learned_state())
    with pytest.raises(ValueError, match=message):
        load_adapter(path, role, config, BASE)
    assert fingerprint(role.learned_state()) == before


@pytest.mark.parametrize("damage", ["cut", "text", "no metadata"])
def test_damaged_adapter_file_is_refused_with_its_path(saved, damage):
    # case B12
    role, path, config = saved
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "text":
        path.write_text("not a safetensors file")
    else:
        save_file(load_file(path), path)
    with pytest.raises(ValueError, match="reward.safetensors"):
        load_adapter(path, role, config, BASE)


def test_critic_takes_the_actors_adapters_and_keeps_its_own_zero_head(
    tmp_path, llama_dir, new_role, role_config
):
    config, actor = role_config(llama_dir), new_role(llama_dir)
    save_adapter(tmp_path / "sft.safetensors", actor, config, BASE)
    critic = new_role(llama_dir, "critic", head="zero", seed=5, trained=False)
    load_adapter(tmp_path / "sft.safetensors", critic, config, BASE)
    for name, p in actor.learned().items():
        assert torch.equal(critic.learned()[name], p), name
    assert (critic.head.weight == 0).all() and (critic.head.bias == 0).all()


def test_reward_model_does_not_take_an_adapter_without_a_head(
    tmp_path, llama_dir, new_role, role_config
):
    # case B04: a head made afresh would be a coin flip
    config = role_config(llama_dir)
    save_adapter(tmp_path / "sft.safetensors", new_role(llama_dir), config, BASE)
    with pytest.raises(ValueError, match="holds the role 'actor', wanted 'reward'"):
        load_adapter(
            tmp_path / "sft.safetensors", new_role(llama_dir, "reward", head="normal"), config, BASE
        )


def test_metadata_says_role_scale_and_base(saved):
    _, path, _ = saved
    with safe_open(path, framework="pt") as file:
        meaning = json.loads(file.metadata()["adapter"])
    assert meaning == {
        "role": "reward", "lora_r": 8, "lora_alpha": 16, "base_sha256": BASE, "pooling": "last",
    }
