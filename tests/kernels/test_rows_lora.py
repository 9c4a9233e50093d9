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
