"""The hash of a model's weights is that of the same model in another library, and of no other model."""

import timm
import torch
from torch import nn

from neuclip_ds.models.weights_hash import weights_hash


def test_names_and_order_have_no_effect() -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    second = nn.BatchNorm1d(4)
    assert weights_hash(nn.ModuleDict({"a": first, "b": second})) == weights_hash(nn.Sequential(second, first))


def test_a_changed_weight_or_shape_changes_the_hash() -> None:
    layer = nn.Linear(3, 4, bias=False)
    before = weights_hash(layer)
    transposed = nn.Linear(4, 3, bias=False)
    transposed.weight.data = layer.weight.data.reshape(3, 4)
    assert weights_hash(transposed) != before
    with torch.no_grad():
        layer.weight[0, 0] += 1e-6
    assert weights_hash(layer) != before


def test_adapters_count_only_on_request() -> None:
    adapted = nn.ModuleDict({"layer": nn.Linear(3, 4), "block": nn.ModuleDict({"lora_A": nn.Linear(3, 2)})})
    before, before_with_adapters = weights_hash(adapted), weights_hash(adapted, with_adapters=True)
    nn.init.ones_(adapted.get_parameter("block.lora_A.weight"))
    assert weights_hash(adapted) == before
    assert weights_hash(adapted, with_adapters=True) != before_with_adapters


def test_equal_weights_in_another_architecture_have_another_hash() -> None:
    plain = timm.create_model("efficientnet_lite0", num_classes=0)
    padded_as_in_tensorflow = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    padded_as_in_tensorflow.load_state_dict(plain.state_dict())
    assert weights_hash(plain) != weights_hash(padded_as_in_tensorflow)
