"""Proves the written-out forward pass: it is the stock model, only by a shorter way.

Oracle: the stock model with the same adapters (`role.lm`, where LoRA is one line of plain autograd), row
by row and without padding, in states, logits, every LoRA gradient and greedy ids. Each hand-written
backward is also compared with autograd on the plain formula.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernel.data.base import load_base
from kernel.fast.blocks import Attention, RMSNorm, rotate
from kernel.fast.packed import pack
from kernel.fast.transformer import Cache, Transformer
from kernel.roles import check_isolation, fingerprint

CPU = torch.device("cpu")
ROWS = [[5, 6, 7, 8, 9], [5, 6, 7, 20, 21, 22, 2], [30], [5, 6, 7, 8, 9], [5, 6], [31, 2, 0, 32]]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near(have, want, tolerance=1e-5):
    torch.testing.assert_close(have, want, rtol=0, atol=tolerance)


def every_state(role, rows) -> list[torch.Tensor]:
    """Our states of all tokens, row by row: (length, D) each."""
    packed = pack(rows, CPU)
    wanted = torch.cat([packed.tokens[r, : len(row)] for r, row in enumerate(rows)])
    return role.transformer.states(packed, wanted).split([len(row) for row in rows])


def stock_states(role, rows) -> list[torch.Tensor]:
    return [role.lm.model(torch.tensor([row])).last_hidden_state[0] for row in rows]


# --- against the stock model ----------------------------------------------------------------------


def test_states_logits_and_all_lora_gradients_equal_the_stock_model(model_dir, new_role):
    role = new_role(model_dir)
    learned = list(role.learned().values())
    ours, stock = every_state(role, ROWS), stock_states(role, ROWS)
    gradients = []
    for states in (ours, stock):
        logits = [role.lm.lm_head(part) for part in states]
        loss = sum((part.log_softmax(-1)[:, :50].sum(1) ** 2).sum() for part in logits) / 1e5
        gradients.append(torch.autograd.grad(loss, learned))
    for have, want in zip(ours, stock):
        near(have, want, 2e-5)
        near(role.lm.lm_head(have), role.lm.lm_head(want), 5e-5)
    for name, have, want in zip(role.learned(), *gradients):
        assert want.abs().max() > 1e-4, name
        torch.testing.assert_close(have, want, rtol=1e-4, atol=2e-5, msg=name)


VARIANTS = {
    "llama biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size of its own": ("llama", {"head_dim": 16}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama a key head per query head": ("llama", {"num_key_value_heads": 4}),
    "qwen2 other eps and base": ("qwen2", {"rms_norm_eps": 0.1}),
    "qwen3 biases, one key head": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "llama3 positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
            }
        },
    ),
    "yarn positions": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "linear positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_architectures_equal_the_stock_model(tmp_path, new_role, variant):
    kind, changes = VARIANTS[variant]
    config = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(8)
        kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
        config = kinds[kind](**config)
        model = AutoModelForCausalLM.from_config(config)
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.data.normal_(0, 0.3)
        model.save_pretrained(tmp_path)
    role = new_role(tmp_path)
    with torch.no_grad():
        for have, want in zip(every_state(role, ROWS), stock_states(role, ROWS)):
            near(have, want, 2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ],
    ids=["gelu", "dynamic positions", "sliding window"],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_the_pass_does_not_do_is_refused(request, new_role, edited_folder, kind, changes):
    folder = edited_folder(request.getfixturevalue(f"{kind}_dir"), "config.json", **changes)
    with pytest.raises(ValueError, match="supported"):
        new_role(folder)


def test_bfloat16_states_are_as_close_to_float32_as_those_of_the_stock_model(model_dir, new_role):
    exact = new_role(model_dir)
    role = new_role(model_dir, base_dtype="bfloat16")
    role.load_learned(exact.learned_state(), "the float32 role")
    with torch.no_grad():
        ours = torch.cat(every_state(role, ROWS))
        assert ours.dtype == torch.bfloat16
        stock, want = (torch.cat(stock_states(r, ROWS)) for r in (role, exact))
    error, stock_error = ((part.float() - want).abs() for part in (ours, stock))
    assert error.mean() < 1.2 * stock_error.mean() and error.max() < 2 * stock_error.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_steps_equal_whole_rows(model_dir, new_role, dtype):
    role = new_role(model_dir, base_dtype=dtype)
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]  # two more tokens each behind a padded prompt
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 11, 12]])
    mask = torch.tensor([[True] * 4, [False, False, True, True]])
    with torch.no_grad():
        whole = every_state(role, rows)
        cache = Cache(role.transformer, 2, 6)
        steps = [role.transformer.last_states(ids, mask, cache)]
        near(role.transformer.last_states(ids, mask), steps[0], 0)
        for column in (4, 5):
            assert cache.filled == column
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
            token = torch.tensor([rows[0][column], rows[1][column - 2]])
            steps.append(role.transformer.next_states(token, mask, cache))
    for r, (row, states) in enumerate(zip(rows, whole)):
        for have, want in zip(torch.stack(steps)[:, r], states[len(row) - 3 :]):
            near(have, want, 2e-5 if dtype == "float32" else 2**-5 * want.abs().max().item())


# --- packing --------------------------------------------------------------------------------------


def test_packing_holds_every_distinct_prefix_once():
    packed = pack(ROWS, CPU)
    prefixes = {tuple(row[: n + 1]) for row in ROWS for n in range(len(row))}
    assert len(packed.ids) == len(packed.positions) == len(packed.homes) == len(prefixes) == 14
    assert len(packed.repeats) == sum(map(len, ROWS)) - len(prefixes)
    for r, row in enumerate(ROWS):
        tokens = packed.tokens[r, : len(row)]
        assert packed.ids[tokens].tolist() == row
        assert packed.positions[tokens].tolist() == list(range(len(row)))
    assert packed.tokens.flatten()[packed.homes].tolist() == list(range(14))
    places = torch.cat([packed.homes, packed.repeats]).tolist()
    width = packed.tokens.shape[1]
    real = [r * width + c for r, row in enumerate(ROWS) for c in range(len(row))]
    assert sorted(places) == real


def test_a_row_does_not_depend_on_its_neighbours_their_order_or_length(model_dir, new_role):
    role, draws = new_role(model_dir), generator(4)
    for _ in range(10):
        rows = [[5, 6, 7], *ROWS]
        for _ in range(int(torch.randint(1, 5, (), generator=draws))):
            length = int(torch.randint(1, 30, (), generator=draws))
            rows.append(torch.randint(3, 97, (length,), generator=draws).tolist())
        order = torch.randperm(len(rows), generator=draws).tolist()
        with torch.no_grad():
            together = every_state(role, [rows[n] for n in order])
            for number, have in zip(order, together):
                near(have, every_state(role, [rows[number]])[0], 2e-5)


def test_repeated_rows_agree_and_add_their_gradients(model_dir, new_role):
    role = new_role(model_dir)
    learned = list(role.learned().values())
    once, twice = every_state(role, [[5, 6, 7]]), every_state(role, [[5, 6, 7]] * 2)
    near(twice[0], twice[1])
    single = torch.autograd.grad(once[0].square().sum(), learned)
    double = torch.autograd.grad(sum(part.square().sum() for part in twice), learned)
    for have, want in zip(double, single):
        torch.testing.assert_close(have, 2 * want, rtol=1e-4, atol=1e-4)


def test_two_passes_have_the_same_bits_in_states_and_gradients(model_dir, new_role):
    role = new_role(model_dir, base_dtype="bfloat16")
    learned = list(role.learned().values())
    passes = []
    for _ in range(2):
        states = torch.cat(every_state(role, ROWS))
        passes.append([states, *torch.autograd.grad(states.float().square().sum(), learned)])
    assert all(torch.equal(first, second) for first, second in zip(*passes))


# --- each function against the plain formula ------------------------------------------------------


def compare(ours, plain, *inputs, tolerance=1e-5):
    """Values, and gradients of all inputs under the same random upstream gradient."""
    results = []
    for function in (ours, plain):
        given = [x.clone().requires_grad_() for x in inputs]
        out = function(*given)
        up = torch.randn(out.shape, generator=generator(99))
        results.append([out, *torch.autograd.grad((out * up).sum(), given)])
    for have, want in zip(*results):
        near(have, want, tolerance)


def test_norm_equals_the_plain_formula():
    x, weight = torch.randn(7, 12, generator=generator(0)), torch.randn(12, generator=generator(1))
    compare(
        lambda x: RMSNorm.apply(x, weight, 1e-3), lambda x: F.rms_norm(x, (12,), weight, 1e-3), x
    )


def test_rotation_equals_the_stock_one_and_its_inverse_is_its_backward():
    x = torch.randn(1, 3, 5, 8, generator=generator(0))  # (1, heads, N, E)
    angle = torch.randn(1, 5, 4, generator=generator(1)).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    signed = torch.cat([-sin[..., :4], sin[..., 4:]], -1)[0, :, None]

    def ours(x, sin=signed):
        return rotate(x[0].transpose(0, 1), cos[0, :, None], sin).transpose(0, 1)[None]

    want = apply_rotary_pos_emb(x, x, cos, sin)[0]
    near(ours(x), want)
    near(ours(want, -signed), x)


@pytest.mark.parametrize("H, K", [(4, 2), (3, 1), (2, 2)])
def test_attention_equals_plain_attention_over_each_row(H, K):
    E, packed = 6, pack(ROWS, CPU)
    N = len(packed.ids)
    angle = torch.randn(N, 1, E // 2, generator=generator(1)).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    sin[..., : E // 2] *= -1
    qkv = torch.randn(N, (H + 2 * K) * E, generator=generator(2))

    def plain(qkv):
        q, k, v = qkv.view(N, -1, E).split([H, K, K], 1)
        q, k = (x * cos + x.roll(E // 2, -1) * sin for x in (q, k))
        out = [None] * N
        for r, row in enumerate(ROWS):
            path = packed.tokens[r, : len(row)]
            one = [x[path].transpose(0, 1)[None] for x in (q, k, v)]
            one = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
            for token, state in zip(path.tolist(), one[0].transpose(0, 1)):
                out[token] = state.flatten()
        return torch.stack(out)

    compare(lambda qkv: Attention.apply(qkv, cos, sin, packed, H, K), plain, qkv)


# --- merged weights -------------------------------------------------------------------------------


def test_merged_weights_are_the_stock_tensors_and_not_copies(model_dir, new_role):
    role = new_role(model_dir)
    for layer in role.transformer.layers:
        for merged in (layer.qkv, layer.o, layer.gate_up, layer.down):
            stock = torch.cat([part.base.weight for part in merged.layers])
            assert torch.equal(merged.weight, stock)
            for part in merged.layers:
                own = part.base.weight.untyped_storage().data_ptr()
                assert own == merged.weight.untyped_storage().data_ptr()
            if merged.bias is not None:
                assert torch.equal(merged.bias, torch.cat([p.base.bias for p in merged.layers]))
    check_isolation([role, new_role(model_dir)])


def test_names_and_fingerprints_are_those_of_the_plain_base(model_dir, new_role):
    role, plain = new_role(model_dir, trained=False), load_base(model_dir, "float32")
    ours = {n.removeprefix("lm.").replace(".base.", "."): p for n, p in role.base().items()}
    assert fingerprint(ours) == fingerprint(dict(plain.named_parameters()))
    assert isinstance(role.transformer, Transformer)
