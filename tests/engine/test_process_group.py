"""All collectives of a step, DeepSpeed's and ours, are of one process group, in the same order on all ranks."""

from typing import Any

import torch.distributed as dist
from ranks import run_ranks
from test_step import TOKENS, config_of, data, place, share

from neuclip_ds.distributed.communicator import Communicator


def collectives_of_a_step(communicator: Communicator, engines: list[str]) -> list[list[tuple[str, str]]]:
    """Name and group of each collective of a second step, for each DeepSpeed config."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from neuclip_ds.distributed.launch import join
    from neuclip_ds.engine.config import load_engine_config
    from neuclip_ds.engine.start import start_engine
    from neuclip_ds.models.build import build_dual_encoder
    from neuclip_ds.objectives import build_objective
    from neuclip_ds.objectives.base import Context
    from neuclip_ds.training.step import TrainStep

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
                found[-1].append((func.overloadpacket.__name__, group.group_name))
            return func(*args, **(kwargs or {}))

    join()
    found: list[list[tuple[str, str]]] = []
    for name in engines:
        config = config_of("fastclip_v3", name)
        model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        engine = start_engine(model, config.optimizer, load_engine_config(config, 2), communicator)
        objective = build_objective(config, Context(16, 100, communicator), torch.float32)
        train = TrainStep(engine, objective, communicator, 4, seed=0)
        train(share(data(0), communicator), place(0))
        found.append([])
        with Collectives():
            train(share(data(1), communicator), place(1))
    return found


def test_one_group_and_one_order() -> None:
    ranks = run_ranks(2, collectives_of_a_step, [f"zero{stage}_bf16" for stage in range(4)])
    assert ranks[0] == ranks[1]
    for step in ranks[0]:
        assert len({group for _, group in step}) == 1
        assert len(step) > 5
