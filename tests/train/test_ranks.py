"Two processes: the loop under data parallel, counting and deltas on a sharded model, the script under torchrun."
from pathlib import Path

import pytest
import torch

from bmlab.train.processes import run_ranks
from fresh import fresh_python, torchrun
from small import save_words

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


def tiny():
    import transformers as tf
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=99,
        )
    )


def trained(rows, rank=0, world=1):
    "State after a few steps of `fit` on this process's rows"
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.delta.lora import Lora
    from bmlab.train.loop import fit
    model = tiny()
    torch.manual_seed(1)
    d = Lora(model, r=4, modules=["*_proj"]).freeze()
    runner = DistributedDataParallel(model) if world > 1 else model
    batch = {"input_ids": rows[rank::world], "labels": rows[rank::world]}
    fit(runner, [batch], torch.optim.SGD(d.trainable(), lr=0.5), steps=4, plot=False)
    return {n: t.detach() for n, t in model.state_dict().items()}


def ddp(rows):
    import torch.distributed as dist
    return trained(rows, dist.get_rank(), dist.get_world_size())


def test_fit_under_data_parallel_equals_one_process():
    rows = torch.randint(0, 99, (8, 12), generator=torch.Generator().manual_seed(0))
    alone, (a, b) = trained(rows), run_ranks(ddp, rows)
    for n in alone:
        assert torch.equal(a[n], b[n])
        # the mean of two half batches, summed in another order
        torch.testing.assert_close(a[n], alone[n], rtol=1e-5, atol=1e-6)


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from bmlab.core import count, resolve, roles
    from bmlab.delta.lora import Lora
    from bmlab.models.tree import tree
    model = tiny()
    names = roles(model)
    d = Lora(model, r=4).freeze()
    with_delta, mesh = count(model), init_device_mesh("cpu", (2,))
    for layer in model.model.layers: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = sum(p.to_local().numel() for p in model.parameters())
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad(): before = model(ids).logits
    for s in d.sites.values(): torch.nn.init.ones_(s.B)
    with torch.no_grad(): on = model(ids).logits
    d.detach()
    try:
        Lora(model, r=2, modules="o_proj")
        late = "accepted"
    except RuntimeError as e: late = str(e)
    with torch.no_grad(): off = model(ids).logits
    return dict(
        same_count=count(model) == with_delta,
        same_roles=roles(model) == names,
        found=len(resolve(model, "q_proj")),
        root=int(tree(model).rows.parameters.iloc[0]),
        total=with_delta.total,
        changed=not torch.equal(on, before),
        back=torch.equal(off, before),
        local=local,
        late=late,
    )


def test_a_sharded_model_is_counted_drawn_and_tuned():
    "FSDP2: global sizes though each process holds half; detaching switches the delta off"
    for r in run_ranks(sharded):
        assert (
            r["same_count"] and r["same_roles"] and r["found"] == 2 and r["root"] == r["total"] and r["changed"]
            and r["back"]
        )
        assert "before sharding" in r["late"] and r["local"] < 0.6 * r["total"]


# (tests/plan/test_scaling_out.py trains so on two hosts)
@pytest.mark.parametrize("launch", [pytest.param(True, marks=pytest.mark.slow), False], ids=["torchrun", "alone"])
def test_train_script(tmp_path, launch):
    text = tmp_path / "text.txt"
    # (as few as there may be: each batch gathers a real model's weights between the ranks)
    text.write_text("\n".join(f"A short line about film number {i}, neither good nor bad." for i in range(40)))
    script, options = ROOT / "scripts/train.py", ["--text", text, "--steps", "2", "--batch", "1", "--length", "32"]
    options += ["--out", tmp_path / "tuned"]
    if launch:                                                      # (each rank alone loads a sample as it is below)
        save_words(tmp_path / "model")
        options += ["--model", tmp_path / "model"]
        out = torchrun(script, *options, cwd=tmp_path)
    else: out = fresh_python(script.read_text(encoding="utf-8"), *options, cwd=tmp_path)
    assert out.returncode == 0, out.stderr[-3000:]
    assert (f"{2 if launch else 1} process" in out.stdout) and (tmp_path / "tuned/adapter_model.safetensors").is_file()
