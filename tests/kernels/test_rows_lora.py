"Each row's own A and B, beside torch"
import pytest
import torch

from bmlab.kernels.triton_groups import rows_lora

DEVICE = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("held", [(4,), (2, 4), (4, 3, 2)])
def test_layers_have_slots_of_their_own(device, held):
    "What a layer has no slot for adds nothing, and what lies behind its slots is not read"
    g = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(*shape, generator=g).to(device)
    K, R, slots = 48, 3, torch.tensor([3, 0, 1, 2, 3, 1])
    layers, x, widths = [], made(12, K), [40, 16, 24][:len(held)]
    for n, O in zip(held, widths):
        A, B, scale = made(n + 4, R, K), made(n + 4, R, O), made(n + 4).abs()
        A[n:], B[n:], scale[n:] = float("nan"), float("nan"), float("nan")
        layers.append((A[:n], B[:n], scale[:n]))
    y = made(12, sum(widths))
    want = []
    for n, (A, B, scale) in zip(held, layers):
        own = [(x[i].double() @ A[s].double().T @ B[s].double() * scale[s].double()
                if 0 < (s := int(slots[i // 2])) < n else torch.zeros(B.shape[2], dtype=torch.float64, device=device))
               for i in range(12)]
        want.append(torch.stack(own))
    want = y.double() + torch.cat(want, 1)
    torch.testing.assert_close(rows_lora(x, layers, slots.to(device), y.clone()).double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(device, dtype):
    "A program for each user of a tile, or one for all: a prompt of one user, steps of many, and both in one pass"
    g = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)
    # (how a processor's own library adds up a row depends on the row's place: there the sums are exact)
    if device == "cpu": made = lambda *shape: torch.randint(-3, 4, shape, generator=g).to(dtype)
    K, R, m = 96, 5, 16
    layers = [(made(4, R, K), made(4, R, O), torch.tensor([0.0, 1.0, 0.5, 2.0], device=device)) for O in (40, 24)]
    slots, x, y = torch.tensor([2, 0, 3], device=device), made(3 * m, K), made(3 * m, 64)
    together = rows_lora(x, layers, slots, y.clone())
    each = slots.repeat_interleave(m)
    assert torch.equal(rows_lora(x, layers, each, y.clone()), together)
    order = torch.randperm(3 * m, generator=g).to(device)
    assert torch.equal(rows_lora(x[order], layers, each[order], y[order].clone()), together[order])
    for i in (0, 20, 47):
        at = slice(i, i + 1)
        assert torch.equal(rows_lora(x[at], layers, each[at], y[at].clone()), together[at])
    assert torch.equal(together[m:2 * m], y[m:2 * m]) and not torch.equal(together, y)
