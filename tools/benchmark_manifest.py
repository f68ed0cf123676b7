"""For developers of neuclip_ds: build a manifest from img2dataset's side files in a store with latency.

A server of this machine answers every request after a delay, as an S3 bucket or a plain HTTP server. It counts requests
and the bytes that it sends. No shard is ever sent: the server only knows their sizes.

Example: python tools/benchmark_manifest.py --shards 130000 --latency 0.05 --stores s3 http
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from neuclip_ds.cli.program import exit_on_mistake

SHARD_BYTES, SAMPLES = 450_000_000, 9_500
STATS = json.dumps(
    {"count": 10_000, "successes": SAMPLES, "failed_to_download": 500, "failed_to_resize": 0, "status_dict": {}}
).encode()


class Server:
    """Shards of any name, each with a side file, for as long as `serve` runs."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self.counts: Counter[str] = Counter()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while request := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, target, _ = request.split(" ", 2)
                await asyncio.sleep(self._latency)
                size, body = self._body(target)
                status = "200 OK" if size is not None else "404 Not Found"
                data = body if method == "GET" else b""
                head = f"HTTP/1.1 {status}\r\nContent-Length: {size or 0}\r\n\r\n".encode()
                self.counts.update({"requests": 1, "bytes": len(data), method: 1})
                writer.write(head + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _body(self, target: str) -> tuple[int | None, bytes]:
        """Return the size and the content of what a request names; of shards there is only the size."""
        name = urlsplit(target).path
        if name.endswith("_stats.json"):
            return len(STATS), STATS
        return (SHARD_BYTES, b"") if name.endswith(".tar") else (None, b"")


def serve(connection: Connection, latency: float) -> None:
    """Send the port, and at each message the counts so far."""

    async def run() -> None:
        server = Server(latency)
        async with await asyncio.start_server(server.answer, "127.0.0.1", backlog=4096) as listening:
            connection.send(listening.sockets[0].getsockname()[1])
            while await asyncio.to_thread(connection.recv):
                connection.send(dict(server.counts))

    asyncio.run(run())


def measure(store: str, shards: int, latency: float, processes: int) -> tuple[float, float, Counter[str]]:
    """Return the seconds of `build-manifest`, its start included, those of its processors, and the server's counts."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, latency), daemon=True)
    server.start()
    endpoint = f"http://127.0.0.1:{ours.recv()}"
    names = f"{{000000..{shards - 1:06d}}}.tar"
    source = f"s3://pool/{names}" if store == "s3" else f"{endpoint}/pool/{names}"
    options = json.dumps({"endpoint_url": endpoint, "key": "k", "secret": "s"})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "neuclip_ds", "build-manifest", f"{folder}/manifest", source]
        began, before = time.perf_counter(), _cpu_of_children()
        subprocess.run(
            [*command, "--from-side-files", f"--processes={processes}"],
            check=True,
            env={**os.environ, "FSSPEC_S3": options, "AWS_DEFAULT_REGION": "us-east-1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds, cpu = time.perf_counter() - began, _cpu_of_children() - before
    ours.send(True)
    counts = Counter(ours.recv())
    server.kill()
    return seconds, cpu, counts


def _cpu_of_children() -> float:
    """Return the CPU seconds of processes that have ended, which the server has not."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer (0.05)")
    parser.add_argument("--stores", nargs="+", choices=("s3", "http"), default=["s3", "http"])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    print(f"{options.shards:,} shards, {1000 * options.latency:g} ms a request, {options.processes} processes\n")
    print("| store | seconds | CPU seconds | requests | MB sent | the shards have |\n|---|---|---|---|---|---|")
    with exit_on_mistake():
        for store in options.stores:
            seconds, cpu, counts = measure(store, options.shards, options.latency, options.processes)
            sent, whole = counts["bytes"] / 1e6, options.shards * SHARD_BYTES / 1e12
            row = f"| {store} | {seconds:.0f} | {cpu:.0f} | {counts['requests']:,} | {sent:.1f} | {whole:.1f} TB |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
