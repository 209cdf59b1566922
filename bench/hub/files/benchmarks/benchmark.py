"""What `kernels benchmark FOLDER` times: each case against PyTorch's operations for the same."""

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from kernels import Benchmark


class TreeAttention(Benchmark):
    """64 nodes after 2,048 rows of a prefix; 32 heads, 8 of keys."""

    seed = 1

    def setup(self):
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.nodes, self.prefix = 64, 2048
        rows = self.nodes + self.prefix
        self.query = torch.randn(1, 32, self.nodes, 128, device=self.device, dtype=dtype)
        self.key, self.value = torch.randn(2, 1, 8, rows, 128, device=self.device, dtype=dtype)
        parents = torch.arange(self.nodes).sub(1).div(2, rounding_mode="floor")  # a binary tree, numbered by depth
        ancestors = torch.eye(self.nodes, dtype=torch.bool)
        for node in range(1, self.nodes):
            ancestors[node] |= ancestors[parents[node]]
        self.ancestors = ancestors.to(self.device)
        seen = torch.ones(self.nodes, self.prefix, dtype=torch.bool, device=self.device)
        self.mask = torch.cat([seen, self.ancestors], 1)

    def benchmark_tree(self):
        given = {"prefix_length": self.prefix, "ancestor_mask": self.ancestors}
        self.out = self.kernel.tree_attention(self.query, self.key, self.value, **given)

    def verify_tree(self):
        return scaled_dot_product_attention(self.query, self.key, self.value, attn_mask=self.mask, enable_gqa=True)


class Layers(Benchmark):
    """64 rows of 4,096 columns."""

    seed = 1

    def setup(self):
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.x, self.y = torch.randn(2, 64, 4096, device=self.device, dtype=dtype)
        self.weight = torch.rand(4096, device=self.device, dtype=dtype)

    def benchmark_rms_norm(self):
        _, self.out = self.kernel.add_rms_norm(self.x, self.y, self.kernel.Norm(self.weight, 1e-6))

    def verify_rms_norm(self):
        return rms_norm(self.x + self.y, (4096,), self.weight, 1e-6)

    def benchmark_silu_product(self):
        self.out = self.kernel.silu_product(self.x, self.y)

    def verify_silu_product(self):
        return silu(self.x) * self.y


if torch.cuda.is_available():

    class Drawing(Benchmark):
        """Four children of each of 64 nodes, and the verification of greedy trees; 128,256 tokens."""

        seed = 1

        def setup(self):
            self.logits = torch.randn(64, 128256, device=self.device)

        def benchmark_top_four(self):
            self.out = self.kernel.gumbel_topk(self.logits, 4, temperature=0).keys

        def verify_top_four(self):
            return self.logits.topk(4).values
