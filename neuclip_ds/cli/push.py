"""Upload an exported model to the Hugging Face hub, or to the server that HF_ENDPOINT names.

Log in first with `hf auth login`, or set HF_TOKEN. The repository is created where it does not exist.

Example:
  neuclip-ds push exported/vitb32_tuneclip someone/vitb32_tuneclip --private
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.errors import UserError

_CARD = "README.md"
_WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "vision_model.onnx")


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds push", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that `neuclip-ds export` wrote")
    parser.add_argument("repository", help="OWNER/NAME on the hub")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", default="main", help="branch to write to; created where it does not exist")
    parser.add_argument("--message", default="Upload model", help="message of the commit")
    options = parser.parse(arguments)
    print(f"Uploaded {options.folder} to {push(**vars(options))}")


def push(folder: Path, repository: str, private: bool, revision: str, message: str) -> str:
    """Upload a folder in one commit; return its address.

    Raises:
        UserError: the folder is no export, or the hub refuses it or cannot be reached.
    """
    if not (folder / _CARD).is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise UserError(f"{folder} is no exported model; write one with `neuclip-ds export RUN --out {folder}`.")
    from huggingface_hub import HfApi, constants  # takes a second to import

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision != "main":
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, revision=revision, commit_message=message)
    except Exception as error:  # the hub's own errors, and those of whatever HTTP library it uses
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder} was not uploaded to {repository} at {constants.ENDPOINT} ({reason}). Check the name and the "
            "network, and log in with `hf auth login` or HF_TOKEN with write access."
        ) from error
    return str(done.commit_url)
