"""Check that processes that share a cache fetch each shard once, obey the size limit, and survive a killed process."""

import os
import pickle
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import forks
import pytest
from servers import Files, files_server, wait_for

from neuclip_ds.data import cache as cache_module
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.fetch import AttemptFailed, FetchError
from neuclip_ds.data.partial_shard import DATA
from neuclip_ds.errors import UserError
from neuclip_ds.files import private_folder

SIZE = 10_000


@pytest.fixture
def http():
    with files_server() as server:
        server.files = {f"{number:05d}.tar": bytes([number]) * SIZE for number in range(30)}
        yield server


def cache_in(folder: Path, shards: float, **options) -> ShardCache:
    """Return a cache with room for the given number of shards."""
    return ShardCache(folder / "cache", int(shards * SIZE), **{"timeout": 2, "backoff": 0.01, **options})


def url(http: Files, number: int) -> str:
    return http.url(f"{number:05d}.tar")


def held(folder: Path) -> list[int]:
    """Return the sorted numbers of the shards in the cache."""
    return sorted(path.read_bytes()[0] for path in (folder / "cache/shards").glob("*.tar"))


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all shards and partial downloads, ignoring files that vanish meanwhile."""
    total = 0
    for place in ("shards", "fetching"):  # in this order, a shard that is moved meanwhile is not counted twice
        for where, _, names in os.walk(folder / "cache" / place):
            for name in names:
                with suppress(FileNotFoundError):
                    total += Path(where, name).stat().st_size
    return total


def left_over(folder: Path) -> list[Path]:
    return list((folder / "cache/fetching").iterdir())


def wait_for_a_part(folder: Path) -> None:
    """Wait until a fetch has started."""
    wait_for(lambda: any((folder / "cache/fetching").glob("*/*")))


def test_a_shard_is_fetched_once(http, tmp_path):
    cache = cache_in(tmp_path, 4)
    path = cache.path(url(http, 3), SIZE)
    assert path.read_bytes() == bytes([3]) * SIZE
    assert path.name.endswith("-00003.tar")
    again = pickle.loads(pickle.dumps(cache))
    assert again.path(url(http, 3), SIZE) == path
    assert cache_in(tmp_path, 4).path(url(http, 3), SIZE) == path, "a later run finds it"
    assert http.gets["00003.tar"] == 1
    assert left_over(tmp_path) == []


def test_equal_names_in_different_places_are_different_shards(tmp_path):
    cache = cache_in(tmp_path, 1)
    for folder in ("a", "b?c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.tar").write_bytes(folder[:1].encode())
    paths = [cache.path(f"file://{tmp_path}/{folder}/0.tar", 1) for folder in ("a", "b?c")]
    assert [path.read_bytes() for path in paths] == [b"a", b"b"]


def test_the_least_recently_used_makes_room(http, tmp_path):
    cache = cache_in(tmp_path, 3.5)
    for number in (0, 1, 2, 0, 3, 4):
        cache.path(url(http, number), SIZE)
        assert size_of(tmp_path) <= cache.capacity_bytes
        time.sleep(0.01)  # the resolution of file times is a few ms
    assert held(tmp_path) == [0, 3, 4]
    assert cache.touch(url(http, 0), SIZE)
    assert not cache.touch(url(http, 1), SIZE)
    time.sleep(0.01)
    cache.path(url(http, 5), SIZE)
    assert held(tmp_path) == [0, 4, 5]


def test_a_shard_that_has_just_arrived_is_counted_once(http, tmp_path, monkeypatch):
    """Another process has moved the shard into the cache, but has not yet removed its reservation."""
    cache = cache_in(tmp_path, 3)
    cache.path(url(http, 0), SIZE)
    arriving = cache_in(tmp_path, 3)
    partial = arriving.begin(url(http, 1), SIZE)
    (partial.folder / DATA).write_bytes(bytes([1]) * SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(ShardCache, "abandon", lambda cache, shard: None)
        assert arriving.complete(partial)
    cache.path(url(http, 2), SIZE)
    assert held(tmp_path) == [0, 1, 2], "nothing has to make room"
    cache.path(url(http, 3), SIZE)
    assert held(tmp_path) == [1, 2, 3]
    arriving.abandon(partial)
    assert left_over(tmp_path) == []


def test_files_of_the_user_in_the_folder_of_the_cache_are_kept(http, tmp_path):
    """The cache's folder may also contain the user's own `shards` or `fetching`."""
    own = [tmp_path / "cache" / name for name in ("shards/00000.tar", "shards/a-1", "fetching/a/0.tar", "fetching/b")]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2 * SIZE))
    cache = cache_in(tmp_path, 1.5)
    for number in range(3):
        cache.path(url(http, number), SIZE)
    assert held(tmp_path) == [0, 2], "the user's shard and the last one"
    assert all(path.is_file() for path in own)
    assert cache.arrived() > SIZE


def test_a_shard_that_has_changed_is_fetched_again(http, tmp_path):
    cache = cache_in(tmp_path, 1.5)
    cache.path(url(http, 1), SIZE)
    http.files["00001.tar"] = b"new" * 4000
    assert cache.path(url(http, 1), 12_000).read_bytes() == b"new" * 4000


def test_sizes_beyond_the_cache_or_the_disk_are_refused(http, tmp_path):
    with pytest.raises(UserError, match=r"00001.tar takes .* GB .* not fit .* raise data.cache_gb .or --cache-gb."):
        cache_in(tmp_path, 0.5).path(url(http, 1), SIZE)
    with pytest.raises(UserError, match=r"^data.cache_gb=1e\+09 is more than the disk of .* holds"):
        ShardCache(tmp_path / "cache", 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        ShardCache(tmp_path / "file", SIZE)


@pytest.mark.parametrize(("fault", "requests"), [(404, 1), ("short", 5)])
def test_a_shard_that_is_missing_or_damaged_is_asked_for_once_a_minute(http, tmp_path, fault, requests):
    http.faults["00002.tar"] = [fault] * requests
    messages = set()
    for _ in range(100):
        with pytest.raises(FetchError) as caught:
            cache_in(tmp_path, 4).path(url(http, 2), SIZE)
        assert caught.value.damaged == (fault == "short")
        messages.add(str(caught.value))
    assert http.gets["00002.tar"] == requests
    assert len(messages) == 1
    assert left_over(tmp_path) == []
    for known in (tmp_path / "cache/failed").iterdir():
        os.utime(known, (time.time() - 61,) * 2)
    assert cache_in(tmp_path, 4).path(url(http, 2), SIZE).exists(), "a minute later it has come back"
    assert http.gets["00002.tar"] == requests + 1


class Clock:
    """A clock in place of the module `time`; it only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1e9  # seconds

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seconds_of_attempt", [0, 100], ids=["at once", "after a long time"])
def test_the_pause_between_attempts_begins_when_an_attempt_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_of_attempt: float
) -> None:
    clock = Clock()
    starts: list[float] = []

    def attempt_after_failure(url: str, folder: Path, *limits: float | None) -> Path:
        starts.append(clock.now)
        if len(starts) == 1:
            clock.sleep(seconds_of_attempt)
            raise AttemptFailed("the server is busy")
        fetched = folder / "fetched"
        fetched.write_bytes(bytes(SIZE))
        return fetched

    monkeypatch.setattr(cache_module, "time", clock)
    monkeypatch.setattr(cache_module, "attempt", attempt_after_failure)
    cache_in(tmp_path, 1, backoff=10).path("https://example.org/0.tar", SIZE)
    first, second = starts
    assert 5 <= second - (first + seconds_of_attempt) <= 10.1, "half of the backoff to all of it, and one poll"


def visit(cache: ShardCache, urls: list[str], barrier) -> None:
    barrier.wait()
    for number, address in enumerate(urls):
        with cache.open(address, SIZE) as file:
            data = file.read()
        assert len(data) == SIZE, (number, len(data))


def in_processes(visits: list[tuple[ShardCache, list[str]]]) -> None:
    context = forks.context()  # forks from a process that has not used fsspec, which is not fork-safe after a first use
    barrier = context.Barrier(len(visits))
    processes = [context.Process(target=visit, args=(*arguments, barrier)) for arguments in visits]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_processes_that_want_the_same_shards_fetch_each_once(http, tmp_path):
    http.delay = 0.02
    urls = [url(http, number) for number in range(12)]
    in_processes([(cache_in(tmp_path, 20), urls) for _ in range(4)])
    assert http.gets == {f"{number:05d}.tar": 1 for number in range(12)}
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_processes_that_press_on_the_capacity_never_exceed_it(http, tmp_path):
    http.delay = 0.005
    cache = cache_in(tmp_path, 3.2)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):  # a fetch takes five times as long as this wait
            most = max(most, size_of(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    orders = [range(30), range(29, -1, -1), range(0, 30, 2), [*range(15, 30), *range(15)]]
    in_processes([(cache, [url(http, number) for number in order]) for order in orders])
    over.set()
    watcher.join()
    assert 2 * SIZE <= most <= cache.capacity_bytes
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("wanted", [5, 6], ids=["the same shard", "another shard"])
def test_a_killed_process_leaves_the_cache_usable(http, tmp_path, wanted):
    """The process is killed while it holds a lock, reserved space and a partial file; one shard fills the cache."""
    http.gate.clear()
    cache = cache_in(tmp_path, 1, timeout=60)
    process = forks.context().Process(target=cache.path, args=(url(http, 5), SIZE))
    process.start()
    wait_for_a_part(tmp_path)
    process.kill()
    process.join()
    assert len(left_over(tmp_path)) == 1
    http.gate.set()
    assert cache.path(url(http, wanted), SIZE).read_bytes() == bytes([wanted]) * SIZE
    assert held(tmp_path) == [wanted]
    assert left_over(tmp_path) == []


def test_a_fetch_of_another_process_is_waited_for(http, tmp_path):
    """Threads wait past their own time-outs for a slow but live process, although each shard needs the whole cache."""
    http.gate.clear()
    process = forks.context().Process(target=cache_in(tmp_path, 1, timeout=60).path, args=(url(http, 5), SIZE))
    process.start()
    wait_for_a_part(tmp_path)
    cache = cache_in(tmp_path, 1, timeout=0.02, max_outage=0.02)
    found = []
    threads = [
        threading.Thread(target=lambda n=number: found.append(cache.path(url(http, n), SIZE))) for number in (5, 6)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert found == [] and http.gets == {"00005.tar": 1}
    http.gate.set()
    for thread in (process, *threads):
        thread.join()
    assert len(found) == 2
    assert size_of(tmp_path) == SIZE


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a world-writable folder, and make it the default folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_each_user_has_a_folder(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder()
    finally:
        os.umask(before)
    assert folder == temporary / f"neuclip_ds_shards-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder() == folder
    (stored := temporary / "0.tar").write_bytes(bytes(SIZE))
    assert ShardCache(folder, SIZE).path(stored.as_uri(), SIZE).read_bytes() == bytes(SIZE)


@pytest.mark.parametrize("planted", ["link", "dangling", "file", "group", "world", "owner"])
def test_a_folder_of_others_is_refused(planted: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / f"neuclip_ds_shards-{os.getuid()}"
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted in ("link", "dangling"):
        folder.symlink_to(elsewhere if planted == "link" else temporary / "absent")
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod({"group": 0o770, "world": 0o707, "owner": 0o700}[planted])
    if planted == "owner" and os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    elif planted == "owner":
        uid = os.getuid()
        folder.rename(temporary / f"neuclip_ds_shards-{uid + 1}")
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(
        UserError,
        match=r"^The shard cache .* only you can write to; set data.cache_dir, .* or TMPDIR to another folder\.$",
    ):
        private_folder()
    assert not any(elsewhere.iterdir())
