"""Rows with tensors come back as they were."""

from __future__ import annotations

import torch

from neuclip_ds.evaluation.packing import Packed


def test_rows_come_back_as_they_were() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3)
    rows = [(pixels[0], ["a", "b"]), ([pixels[1], pixels[3]], None), ((), {"x": pixels[2]})]
    found = Packed.of(rows).rows()
    assert torch.equal(found[0][0], pixels[0]) and found[0][1] == ["a", "b"]
    assert torch.equal(torch.stack(found[1][0]), pixels[[1, 3]]) and found[1][1] is None
    assert torch.equal(found[2][1]["x"], pixels[2])
    assert found[2][1]["x"].dtype == torch.uint8


def test_all_tensors_are_handed_over_as_one() -> None:
    packed = Packed.of([torch.zeros(3, 5), torch.ones(3, 5)])
    assert packed.tensors.shape == (2, 3, 5)
    assert len(packed.pickled) < 100


def test_rows_without_tensors() -> None:
    assert Packed.of([["a caption"], []]).rows() == [["a caption"], []]
    assert Packed.of([]).rows() == []
