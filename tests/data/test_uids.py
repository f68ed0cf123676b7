"""Search in sorted 128-bit uids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuclip_ds.data.uids import UID, UidFiles, parse_uid, uid_of
from neuclip_ds.errors import UserError

WORD = st.integers(0, 3) | st.integers(2**64 - 3, 2**64 - 1)
OTHERS = ("uids.npz", "floats.npy", "numbers.npy")
WORDS = st.lists(st.tuples(WORD, WORD), max_size=12)


def test_parsing():
    assert parse_uid("0123456789abcdef" + "f" * 16) == (0x0123456789ABCDEF, 2**64 - 1)
    for other in (None, 5, "", "0" * 31, "0" * 33, "g" * 32):
        assert parse_uid(other) is None
    assert uid_of(b'{"id": "' + b"0" * 31 + b'7"}', "id") == (0, 7)
    for data in (b"", b"[]", b"{}", b"{cut"):
        assert uid_of(data, "id") is None


@given(listed=st.lists(WORDS, min_size=1, max_size=3), asked=WORDS)
def test_counts_are_those_of_a_plain_search(tmp_path_factory, listed, asked):
    folder = tmp_path_factory.mktemp("uids")
    for number, words in enumerate(listed):
        np.save(folder / f"{number}.npy", np.array(sorted(words), dtype=np.dtype("u8,u8")))
    files = UidFiles(sorted(folder.iterdir()))
    files.check_order()
    counts = files.count(np.array(asked, dtype=UID))
    assert counts.tolist() == [sum(words.count(uid) for words in listed) for uid in asked]


def test_unusable_files(tmp_path):
    path = tmp_path / "uids.npy"
    np.save(path, np.array([(1, 2)], dtype=np.dtype("u8,u8")))
    good = path.read_bytes()
    np.savez(tmp_path / "uids.npz", np.load(path))
    np.save(tmp_path / "floats.npy", np.array([(1, 2)], dtype=np.dtype("f8,f8")))
    np.save(tmp_path / "numbers.npy", np.arange(3))
    contents = [
        b"",
        good[:20],
        good[:-1],
        good.replace(b"(1,)", b"(9" + b"9" * 10 + b",)"),
        b"\x93NUMPY" + b"\xff" * 99,
    ]
    contents += [good.replace(b"'shape'", b"'shape"), *((tmp_path / name).read_bytes() for name in OTHERS)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"uids.npy (cannot be read|has dtype .*, not u8,u8)") as caught:
            UidFiles([path])
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"uids.npy cannot be read"):
        UidFiles([path])
    np.save(path, np.array([(1, 2), (1, 1), (3, 0)], dtype=np.dtype("u8,u8")))
    with pytest.raises(UserError, match=r"uids.npy is not sorted"):
        UidFiles([path]).check_order()
