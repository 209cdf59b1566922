"""Find the tensors that accelerate's hooks load into a model's modules, and where they are stored.

`from_pretrained(folder, device_map=..., offload_folder=...)` leaves weights that the map assigns to "disk" on disk, and
those assigned to "cpu" (with a GPU) in the host's memory. Hooks load each weight when its module is called, and drop it
afterwards. They know where every weight is: in memory, in the model's own files, or in `offload_folder` if it was
converted.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heavypath.speculative.streaming.source import Place, places_in

CONVERTED = 20  # at most 1/20 of the bytes may stay in memory because they are saved in another dtype


class Offloaded(NamedTuple):
    """A tensor that a module lacks until accelerate's hook loads it.

    module, name: the module, and the name of its parameter or buffer
    key:     the tensor's name in `weights`
    weights: accelerate's mapping from keys to tensors, which loads them from memory or files
    device:  where the module computes
    """

    module: nn.Module
    name: str
    key: str
    weights: Any  # accelerate's OffloadedWeightsLoader; a dict where all weights are in memory
    device: torch.device

    @property
    def in_memory(self) -> dict[str, Tensor]:
        """The tensors of the whole model that are in the host's memory and not in files."""
        return getattr(self.weights, "state_dict", self.weights)

    @property
    def is_in_memory(self) -> bool:
        """Whether the tensor is in the host's memory."""
        return self.key in self.in_memory

    @property
    def own(self) -> Tensor:
        """The meta tensor (shape and dtype, without memory) that the module has instead."""
        return getattr(self.module, self.name)

    def value(self) -> Tensor:
        """Load the tensor from memory or file, in the model's dtype."""
        return self.weights[self.key].to(self.own.dtype)


def with_index(device: Any) -> torch.device:
    """`device` as a torch.device; "cuda" without an index becomes the current GPU."""
    found = torch.device(device)
    is_any = found.type == "cuda" and found.index is None and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_any else found


def offloaded(model: nn.Module) -> Iterator[Offloaded]:
    """Each tensor of a model that accelerate's hooks load when its module is called."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            weights = getattr(each, "weights_map", None)
            if weights is None or not getattr(each, "offload", False):
                continue
            device = with_index("cpu" if each.execution_device is None else each.execution_device)
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            buffers = module.named_buffers(recurse=False, remove_duplicate=False) if each.offload_buffers else ()
            for name, tensor in (*parameters, *buffers):
                if tensor.device.type == "meta":
                    yield Offloaded(module, name, f"{weights.prefix}{name}", weights.dataset, device)


def device_of(tensors: list[Offloaded]) -> torch.device:
    """The device that the tensors are loaded to.

    Raises ValueError for several devices, one that is neither CPU nor CUDA, and a CPU's weights that are not on disk.
    """
    devices = sorted({str(tensor.device) for tensor in tensors})
    device = torch.device(devices[0])
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the weights are offloaded for {', '.join(devices)}; streams are for a CPU or for one CUDA GPU: load the "
            'model with a device_map of only that GPU, "cpu" and "disk"'
        )
    in_memory = next((tensor.key for tensor in tensors if tensor.is_in_memory), None)
    if device.type == "cpu" and in_memory is not None:
        raise ValueError(
            f"{in_memory} is offloaded from a CPU to its own memory; streams for a CPU need weights on disk: "
            'load the model with a device_map of "cpu" and "disk"'
        )
    return device


def check_plain(tensor: Offloaded) -> None:
    """Raise ValueError for a parameter of a subclass, such as a quantised one, which a stream cannot load."""
    if isinstance(tensor.own, nn.Parameter) and type(tensor.own) is not nn.Parameter:
        kind = type(tensor.own).__name__
        raise ValueError(f"{tensor.key} is a {kind}, which is no plain tensor and cannot be streamed")


def place_of(tensor: Offloaded, headers: dict[str, dict[str, Place]]) -> Place:
    """Where a tensor is on disk, by accelerate's index. Raises ValueError if its shape differs from the model's.

    headers: the tensors of the safetensors files read so far, by path; this function adds files to it
    """
    facts = tensor.weights.index[tensor.key]
    path = facts.get("safetensors_file")
    if path is None:
        path = f"{tensor.weights.save_folder}/{tensor.key}.dat"
        place = Place(path, 0, getattr(torch, facts["dtype"]), (*facts["shape"],))
    else:
        if path not in headers:
            headers[path] = places_in(path)
        place = headers[path][facts.get("weight_name", tensor.key)]
    if place.shape != (*tensor.own.shape,):
        shapes = f"{[*place.shape]}, the model has it as {[*tensor.own.shape]}"
        raise ValueError(f"{tensor.key} is saved as {shapes}; the files are of another model")
    return place


def check_converted(converted: list[Offloaded], tensors: list[Offloaded]) -> None:
    """Raise ValueError if more than 1/20 of the offloaded bytes are saved in another dtype than the model's.

    transformers keeps some weights in float32, such as routers of experts. These stay in memory: a stream converts
    nothing.

    converted: the tensors with another dtype; tensors: all offloaded tensors
    """
    if CONVERTED * sum(one.own.nbytes for one in converted) > sum(one.own.nbytes for one in tensors):
        raise ValueError(
            f"{converted[0].key} and {len(converted) - 1} other tensors are not saved in the type that the model has "
            f'them in, {converted[0].own.dtype}; weights are streamed as they are: load the model with dtype="auto"'
        )


def put(tensor: Offloaded, value: Tensor, of_id: dict[int, nn.Parameter]) -> None:
    """Set a tensor that a module lacks.

    of_id: parameters made so far, by the id of the meta tensor that they replace, so that tied parameters stay tied
    """
    own = tensor.own
    if isinstance(own, nn.Parameter):
        made = of_id.setdefault(id(own), nn.Parameter(value, requires_grad=False))
        of_id[id(made)] = made
        setattr(tensor.module, tensor.name, made)
    else:
        setattr(tensor.module, tensor.name, value)


def detach_hooks(model: nn.Module) -> None:
    """Remove accelerate's hooks, and everything that they left in the modules; weights in memory are in place then."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for module in model.modules():
        left = vars(module).get("forward")
        if getattr(left, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]
