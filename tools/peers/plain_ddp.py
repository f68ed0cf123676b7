"""Run one rank of a plain training loop for tools/benchmark_step.py: DistributedDataParallel and OpenCLIP's loss.

The towers are this project's. webdataset loads the data, as in open_clip, with torchvision's transforms and float32
pixels.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import webdataset as wds
from benchmarking import clip_loss, initial_logit_scale, program_parser
from benchmarking.launches import record_launches
from benchmarking.random_pairs import float_batches
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from torchvision import transforms

from neuclip_ds.config import Config
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment, read_environment
from neuclip_ds.engine.start import parameter_groups
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.planning.memory import StandInTokenizer
from neuclip_ds.recipe import load_recipe, validate

# samples in the shuffle buffer, as in open_clip
_SHUFFLED = 5000
_SHUFFLED_AT_FIRST = 1000
_LARGEST_SCALE = math.log(100)


class FloatTowers(nn.Module):
    """The towers, which take float32 pixels normalized by torchvision, and the temperature."""

    def __init__(self, towers: DualEncoder, logit_scale: float) -> None:
        super().__init__()
        self.vision = towers.vision
        self.text = towers.text
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale))

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (b, 3, H, W) normalized pixels and (b, T) ids to (b, d) image and text features and the logit scale."""
        vision: Any = self.vision
        image_features = normalize(vision.projection(vision.trunk(image)), dim=-1)
        return image_features, normalize(self.text(tokens), dim=-1), self.logit_scale.exp()


def main() -> None:
    arguments = program_parser(__doc__).parse_args()
    environment = read_environment()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", environment.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if environment.world_size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, environment, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(arguments: argparse.Namespace, environment: RankEnvironment, device: torch.device) -> None:
    config = validate(load_recipe(str(arguments.config)))
    text = config.model.text
    tokenizer: Any = StandInTokenizer(text)
    if text.tokenizer:
        tokenizer = CaptionTokenizer.load(text.tokenizer, text.resolved_context_length())
    torch.manual_seed(config.run.seed)
    towers = FloatTowers(build_dual_encoder(config.model, tokenizer), initial_logit_scale(config)).to(device)
    model: Any = DistributedDataParallel(towers) if environment.world_size > 1 else towers
    if config.model.compile:
        model = torch.compile(model)
    constants = config.optimizer
    groups = parameter_groups(towers, constants)
    optimizer = torch.optim.AdamW(groups, lr=constants.lr, betas=constants.betas, eps=constants.eps)
    loss_of = clip_loss(Communicator(device))
    loaded: Iterator[tuple[Tensor, Tensor]]
    if arguments.random:
        rows = config.rank_batch(environment.world_size)
        pairs = float_batches(config, rows, arguments.caption_tokens, environment.rank, environment.world_size)
        loaded = itertools.cycle(pairs)
    else:
        loaded = batches(config, tokenizer, environment)

    def step() -> Tensor:
        """Update the weights on the next batch; return the loss."""
        image, tokens = next(loaded)
        image = image.to(device, non_blocking=True)
        tokens = tokens.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.bf16):
            loss = loss_of(*model(image, tokens))
        loss.backward()
        if constants.max_grad_norm:
            nn.utils.clip_grad_norm_(towers.parameters(), constants.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            towers.logit_scale.clamp_(0, _LARGEST_SCALE)
        return loss.detach()

    writer = SummaryWriter(str(arguments.out / "tensorboard")) if environment.rank == 0 else None
    for number in range(1, 1 + (config.max_steps or 0)):
        loss = step()
        if writer is not None and number % config.run.log_every == 0:
            writer.add_scalar("loss", loss.item(), number)
    if writer is not None:
        writer.close()
    if arguments.random:
        record_launches(step, arguments.out, environment.rank, bool(config.model.compile))


def batches(
    config: Config, tokenizer: CaptionTokenizer, environment: RankEnvironment
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches endlessly; every rank and worker draws shards independently, as with --dataset-resampled."""
    vision = config.model.vision
    data = config.data
    crop = transforms.RandomResizedCrop(
        vision.resolved_image_size(), (data.crop_scale, 1.0), interpolation=transforms.InterpolationMode.BICUBIC
    )
    transform = transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize(*vision.statistics())])
    pipeline = wds.DataPipeline(
        wds.ResampledShards(resolve_shards("::".join(data.train_paths)), seed=environment.rank, deterministic=True),
        wds.tarfile_to_samples(),
        wds.shuffle(_SHUFFLED, initial=_SHUFFLED_AT_FIRST),
        wds.decode("pilrgb"),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=transform, text=lambda text: tokenizer([text])[0]),
        wds.to_tuple("image", "text"),
        wds.batched(config.rank_batch(environment.world_size), partial=False),
    )
    prefetch = data.prefetch if data.workers else None
    options = {"num_workers": data.workers, "prefetch_factor": prefetch, "pin_memory": torch.cuda.is_available()}
    return iter(wds.WebLoader(pipeline, batch_size=None, **options))


if __name__ == "__main__":
    main()
