"""compact_cache against a loop over rows."""

import pytest
import torch

from heavypath.kernels.cache_compaction import compact_cache


def test_accepted_rows_move_behind_the_prefix_and_nothing_else_changes():
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        batch, nodes, depth, rows = 3, 9, 4, 20
        keys = [torch.randn(batch, 2, rows, 4) for _ in range(3)]
        values = [torch.randn(batch, 2, rows, 4) for _ in range(3)]
        prefix = torch.randint(0, rows - nodes, (batch,), generator=generator)
        length = torch.randint(0, depth + 1, (batch,), generator=generator)
        path = torch.full((batch, depth + 1), -1)
        for b in range(batch):
            chosen = torch.randperm(nodes - 1, generator=generator)[: length[b]].sort().values + 1
            path[b, : length[b] + 1] = torch.cat([torch.zeros(1, dtype=torch.long), chosen])
        before = [cache.clone() for cache in (*keys, *values)]
        compact_cache(keys, values, path, length, prefix)
        for old, new in zip(before, (*keys, *values), strict=True):
            for b in range(batch):
                expected = old[b].clone()
                for j in range(1, int(length[b]) + 1):
                    expected[:, prefix[b] + j] = old[b, :, prefix[b] + path[b, j]]
                assert torch.equal(new[b], expected), trial


def test_overlapping_moves_read_before_they_write():
    keys, values = [torch.arange(8.0).view(1, 1, 8, 1)], [torch.arange(8.0).view(1, 1, 8, 1) + 10]
    compact_cache(keys, values, torch.tensor([[0, 2, 3, 5]]), torch.tensor([3]), torch.tensor([1]))
    assert keys[0].flatten().tolist() == [0, 1, 3, 4, 6, 5, 6, 7]
    assert values[0].flatten().tolist() == [10, 11, 13, 14, 16, 15, 16, 17]


def test_views_with_strides_are_compacted_in_place():
    storage = torch.arange(16.0).view(1, 8, 2, 1)
    compact_cache(
        [storage.transpose(1, 2)], [storage.clone().transpose(1, 2)], *map(torch.tensor, ([[0, 3]], [1], [2]))
    )
    assert storage[0, 3].flatten().tolist() == [10, 11]


@pytest.mark.parametrize(("change", "message"), [
    ({"values": []}, "one entry per layer, got 1 and 0"),
    ({"length": torch.tensor([1.0])}, r"length must be a LongTensor \[1\]"),
    ({"prefix_length": torch.tensor([1, 2])}, r"prefix_length must be a LongTensor \[1\]"),
    ({"path": torch.tensor([[0, 9]])}, "rows 0 .. 7"),
    ({"length": torch.tensor([2])}, "length must be in 0 .. 1"),
    ({"keys": [torch.zeros(2, 1, 8, 4)]}, r"\[1, Hkv, S, D\]"),
    ({"keys": [torch.zeros(1, 1, 9, 4)]}, r"of one shape, got \[1, 1, 9, 4\] and \[1, 1, 8, 4\]"),
    ({"impl": "x"}, "impl .* got 'x'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {
        "keys": [torch.zeros(1, 1, 8, 4)], "values": [torch.zeros(1, 1, 8, 4)], "path": torch.tensor([[0, 2]]),
        "length": torch.tensor([1]), "prefix_length": torch.tensor([3]),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        compact_cache(**arguments)
