"""A target split over GPUs: NCCL's collectives within the CUDA graphs of steps, which every rank captures alike.

With one GPU the process is a group of one, whose collectives still go through NCCL; with two there are two processes.
"""

import pytest
import torch
import torch.distributed as dist
from gpu_cases import MINIATURE, Captured, assert_alike
from rank_processes import on_ranks
from rank_work import METHODS, PADDING, PROMPTS, llama, load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.models import forward_of
from heavypath.speculative.models import llama as llama_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(MINIATURE, reason="no NCCL where a GPU is played; gloo has test_tensor_parallel.py"),
]
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
COLUMNS = ("o_proj", "down_proj")
DECODERS = {True: Captured, False: SpeculativeDecoder}  # by whether steps are graphs


def split_over_one(model, mesh):
    """The model with weights as transformers splits them, over a mesh of one device, which it would leave whole."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ROWS + COLUMNS:
            part = DTensor.from_local(module.weight.detach(), mesh, [Shard(0 if last in ROWS else 1)])
            module.weight = torch.nn.Parameter(part, requires_grad=False)
    return model


@pytest.fixture
def mesh(tmp_path):
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", f"file://{tmp_path}/store", world_size=1, rank=0, device_id=device)
    yield DeviceMesh("cuda", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_nccls_collectives_is_captured_and_writes_the_eager_text(mesh, method, monkeypatch):
    # Its modules call DTensors as tensors, and its embedding has no hook of transformers'.
    monkeypatch.setattr(forward_of, "_is_a_llama", lambda model, name: True)
    monkeypatch.setattr(llama_forward, "is_plain_embedding", lambda module: True)
    target, whole = split_over_one(llama(1).cuda(), mesh), llama(1).cuda()
    draft = None if method == "autoregressive" else llama(2).cuda()
    options = {"temperature": 0.6, "seed": 7, "attention_mask": PADDING.cuda(), "eos_token_id": None}
    texts = [
        DECODERS[on](model, draft, method, cuda_graphs=on).generate(PROMPTS.cuda(), 24, **options)
        for model, on in ((target, True), (target, False), (whole, False))
    ]
    assert SpeculativeDecoder(target, draft, method)._target.ranks.count == 1
    assert_alike(texts[0], texts[1])
    assert torch.equal(texts[0].sequences, texts[2].sequences)


def decode_by_nccl(folder, methods):
    """What a rank of several GPUs decodes, with and without graphs."""
    torch.cuda.set_device(dist.get_rank())
    target = load(folder, "target", tp_plan="auto", tp_size=dist.get_world_size()).cuda()
    draft = load(folder, "draft").cuda()
    options = {"temperature": 0.6, "seed": 7, "attention_mask": PADDING.cuda(), "eos_token_id": None}
    return {
        (method, on): DECODERS[on](target, draft if method != "autoregressive" else None, method, cuda_graphs=on)
        .generate(PROMPTS.cuda(), 24, **options)
        .sequences.cpu()
        for method in methods
        for on in (True, False)
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_write_one_text(tmp_path):
    target, draft = llama(1), llama(2)
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    ranks = on_ranks(2, decode_by_nccl, tmp_path, METHODS, backend="nccl")
    for case, text in ranks[0].items():
        assert torch.equal(text, ranks[1][case])
        assert torch.equal(text, ranks[0][case[0], False])
