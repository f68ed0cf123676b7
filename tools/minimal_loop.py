"""A minimal training loop with this project's losses: two towers, DDP, AdamW and a retrieval score.

Read this file first. The trainer (neuclip_ds/training/) does the same for long runs of large models, with ZeRO,
checkpoints, remote shards and fault handling. `torchrun --nproc-per-node 2 tools/minimal_loop.py` trains on two ranks
with the same global batches.

Examples:
    python tools/minimal_loop.py                # demo pairs, rendered on the first run
    python tools/minimal_loop.py --data /data/mine --method openclip
    python tools/minimal_loop.py --plugin margin_loss.py --method margin    # docs/how-to/custom_loss.md
"""

import argparse
import io
import os
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms.functional import pil_to_tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.losses import ContrastiveLoss, IndexedDataset, import_plugin
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.tokenizer import CaptionTokenizer

DEMO = Path("data/minimal")
DIM = 64
SIZE = 32
CONTEXT = 32
LR = 1e-3


class Pairs(Dataset[tuple[Tensor, str]]):
    """Pairs from a folder of tar shards, by index: (3, SIZE, SIZE) pixels in [-1, 1] and a caption."""

    def __init__(self, shards: Path) -> None:
        manifest = build_manifest(resolve_shards(str(shards)), processes=1)  # position of each sample in its tar
        self._reader = TarReader(manifest)
        self._count = manifest.n

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        image = Image.open(io.BytesIO(self._reader.read(index).image or b"")).convert("RGB")
        return pil_to_tensor(image.resize((SIZE, SIZE))) / 127.5 - 1, self.caption(index)

    def caption(self, index: int) -> str:
        return self._reader.read(index, with_image=False).texts["txt"].decode()


class Towers(nn.Module):
    """An image tower from timm and a text tower from transformers; the features are normalized."""

    def __init__(self, tokenize: CaptionTokenizer) -> None:
        super().__init__()
        self._tokenize = tokenize
        self.image = timm.create_model(
            "vit_tiny_patch16_224",
            num_classes=DIM,
            img_size=SIZE,
            patch_size=8,
            embed_dim=96,
            depth=3,
            num_heads=3,
        )
        config = CLIPTextConfig(
            vocab_size=tokenize.vocab_size,
            bos_token_id=tokenize.bos_id,
            eos_token_id=tokenize.eos_id,
            max_position_embeddings=CONTEXT,
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=3,
            projection_dim=DIM,
        )
        self.text = CLIPTextModelWithProjection(config)

    def forward(self, images: Tensor, captions: list[str]) -> tuple[Tensor, Tensor]:
        tokens = self._tokenize(list(captions)).to(images.device)
        return normalize(self.image(images), dim=1), normalize(self.text(tokens).text_embeds, dim=1)


@torch.no_grad()
def recall_at_1(towers: nn.Module, pairs: Pairs, device: torch.device) -> float:
    """Return the fraction of images whose own caption is the most similar of all captions."""
    towers.eval()
    image_batches = []
    text_batches = []
    for pixels, captions in DataLoader(pairs, 256):
        image, text = towers(pixels.to(device), captions)
        image_batches.append(image)
        text_batches.append(text)
    towers.train()
    most_similar = (torch.cat(image_batches) @ torch.cat(text_batches).T).argmax(dim=1)
    own = torch.arange(len(most_similar), device=device)
    return float((most_similar == own).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        default=DEMO,
        help=f"folder with shards in train/ and val/ (default: {DEMO}, which is created with demo pairs)",
    )
    parser.add_argument(
        "--method", default="fastclip_v1", help="a method in docs/reference/losses.md (default: fastclip_v1)"
    )
    parser.add_argument("--plugin", help="a module or .py file that registers a method of your own (default: none)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the pairs (default: 6)")
    parser.add_argument("--batch", type=int, default=128, help="global batch size, over all ranks (default: 128)")
    options = parser.parse_args()
    if options.plugin:
        import_plugin(options.plugin)

    # torchrun sets these variables; without torchrun, there is one process, which needs no process group
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank == 0 and options.data == DEMO and not DEMO.exists():
        make_demo_data(DEMO, pairs=4_000, held_out=500, zero_shot=80)
    if ranks > 1:
        dist.barrier()

    # Most methods keep per-sample statistics: IndexedDataset adds the sample's index, the same in every epoch.
    pairs = Pairs(options.data / "train")
    train = IndexedDataset(pairs)
    sampler: DistributedSampler[int] = DistributedSampler(train, ranks, rank, drop_last=True)
    loader = DataLoader(train, options.batch // ranks, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    # a pretrained text tower comes with its own tokenizer
    tokenizer = train_bpe([pairs.caption(index) for index in range(len(pairs))], 1000, CONTEXT)
    towers = Towers(tokenizer).to(device)
    model = DistributedDataParallel(towers) if ranks > 1 else towers
    optimizer = AdamW(model.parameters(), LR, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, LR, options.epochs * len(loader), pct_start=0.1, cycle_momentum=False)
    # The loss gathers the features of all ranks and trains the temperature and the method's other parameters itself.
    loss_fn = ContrastiveLoss(
        options.method,
        dim=DIM,
        samples=len(train),
        lr=LR,
        device=device,
        epochs=options.epochs,
        steps_per_epoch=len(loader),
    )
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, captions, index in loader:
            image, text = model(images.to(device), captions)
            loss = loss_fn(image, text, index)  # the global batch's loss on every rank
            optimizer.zero_grad()
            loss.backward()  # DDP averages the towers' gradients, as the loss expects (reduction="ddp_mean")
            optimizer.step()
            scheduler.step()
            loss_fn.lr = optimizer.param_groups[0]["lr"]  # the temperature's learning rate follows the towers'
        if rank == 0:  # to compare methods, `metrics` of most methods also has OpenCLIP's loss of the same batch
            metrics = {"loss": loss.item(), **loss_fn.metrics}
            print(f"epoch {epoch + 1}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    if rank == 0:
        val = Pairs(options.data / "val")
        print(f"recall@1 {recall_at_1(towers, val, device):.4f} (chance {1 / len(val):.4f})")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
