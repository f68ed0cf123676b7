"""A run never prints or writes the secrets of a remote store, and the umask sets the permissions of its files."""

import os
import re
from pathlib import Path

import pytest
from servers import Files, files_server
from small_runs import call, training
from tars import write_pairs

from neuclip_ds.errors import UserError, redact

PLANTED = ("planted-password", "planted-signature", "planted-key-of-aws", "planted-key-of-wandb")
PASSWORD, SIGNATURE, AWS, WANDB = PLANTED


def planted_in(*texts: str) -> set[str]:
    """Return the planted secrets that one of the texts contains."""
    together = "\n".join(texts)
    return {secret for secret in PLANTED if secret in together}


def in_folder(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return planted_in(*[path.read_bytes().decode("latin-1") for path in files])


def signed(server: Files, name: str) -> str:
    address = server.url(f"{name}.tar?X-Amz-Signature={SIGNATURE}")
    return address.replace("http://", f"http://user:{PASSWORD}@")


@pytest.mark.slow
def test_a_run_on_signed_urls_writes_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard vanishes after the manifest is built, and the first request for another shard fails with status 500."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS)
    monkeypatch.setenv("WANDB_API_KEY", WANDB)
    local = write_pairs(tmp_path / "local", [7, 9, 8])
    manifest, runs = tmp_path / "manifest", tmp_path / "runs"
    with files_server() as server:
        for path in local.iterdir():
            server.files[f"{path.name}?X-Amz-Signature={SIGNATURE}"] = path.read_bytes()
        urls = [signed(server, f"{number:05d}") for number in range(3)]
        built = call("tools/build_manifest.py", str(manifest), *urls, "--processes", "1")
        del server.files[f"00001.tar?X-Amz-Signature={SIGNATURE}"]
        server.faults[f"00000.tar?X-Amz-Signature={SIGNATURE}"] = [500]
        cache = [f"--data.cache_dir={tmp_path}/cache", "--data.cache_gb=0.001"]
        done = call("train.py", *training(runs, str(manifest), 3), *cache, ranks=2)
        missing = call(
            "tools/build_manifest.py", str(tmp_path / "none"), signed(server, "absent"), "--processes", "1", code=2
        )
    assert "***" in missing.stderr
    assert (runs / "run" / "bad_samples.jsonl").read_text().count("***@127.0.0.1")
    for program in (built, done, missing):
        assert planted_in(program.stdout, program.stderr) == set()
    assert in_folder(runs) == set()
    assert in_folder(manifest) == {PASSWORD, SIGNATURE}  # the manifest needs the secrets, so only its owner may read it
    assert (manifest / "shards.parquet").stat().st_mode & 0o777 == 0o600
    for path in runs.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask(), path


def umask() -> int:
    """Return this process's umask, which child processes inherit."""
    (mask,) = re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(mask, 8)


def test_a_config_with_a_secret_is_refused(tmp_path: Path) -> None:
    for option in (f"--data.train=https://user:{PASSWORD}@host/0.tar", f"--data.val=s3://b/0.tar?sig={SIGNATURE}"):
        done = call("train.py", *training(tmp_path, "data", 1), option, code=2)
        assert "the value contains a secret" in done.stderr
        assert planted_in(done.stdout, done.stderr) == set()
    assert in_folder(tmp_path) == set()


def test_credentials_queries_and_authorization_headers_are_redacted() -> None:
    text = f"cannot read s3://b/1.tar?sig={SIGNATURE}&x=1 (https://me:{PASSWORD}@host/a)"
    assert redact(text) == "cannot read s3://b/1.tar?*** (https://***@host/a)"
    assert redact(redact(text)) == redact(text)
    command = f"curl -H 'Authorization: Bearer {SIGNATURE}' https://host/{{0..9}}.tar"
    assert planted_in(redact(command)) == set()
    for plain in ("/data/{0..9}.tar", "s3://bucket/00.tar", "what? https://host/page", "uid_key=uid", os.devnull):
        assert redact(plain) == plain
    assert str(UserError(f"https://a:{PASSWORD}@b cannot be read")) == "https://***@b cannot be read"
