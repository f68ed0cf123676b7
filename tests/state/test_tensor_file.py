"""The safetensors library can read files that were written in chunks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neuclip_ds.state import tensor_file
from neuclip_ds.state.tensor_file import TensorFile, row_chunks


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_the_library_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(7, 5),
        "columns of another": torch.randn(6, 4)[:, 1:3],
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(9).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.arange(11),
    }
    TensorFile("x.safetensors", tensors).write(tmp_path)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_row_chunks_are_views_that_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    table = torch.zeros(11, 3)
    for number, chunk in enumerate(row_chunks(table)):
        assert chunk.numel() * 4 <= 64
        chunk += number
    assert table[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
