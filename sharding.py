"""One language model over several processes, each of which keeps a share of every layer's weights (PyTorch's fully_shard).

    torchrun --nproc_per_node=8 finetune.py configs/finetune_llama31.py --shard

The layers are shared out; embedding, head and last norm are whole everywhere. A layer's weights are gathered while it works. Nothing
here is about conditioning, and train.py does without it when --shard is not given.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model, device):
    """Share out the layers of model.body.lm, and move all to the device, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)


def whole(x):
    """A tensor, or a nest of dicts and lists of them, put together again, on the CPU of the first process; the others get None for
    shares. Every process has to call it.
    """
    if isinstance(x, dict):
        return {key: whole(value) for key, value in x.items()}
    if isinstance(x, list):
        return [whole(value) for value in x]
    if not isinstance(x, DTensor):
        return x
    full = x.full_tensor()  # one at a time on every GPU
    return full.cpu() if dist.get_rank() == 0 else None


def load_optimizer(optimizer, state):
    """optimizer.load_state_dict of a state that `whole` has put together."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, of in state["state"].items():
        if isinstance(params[i], DTensor):
            for name, value in of.items():
                if value.shape == params[i].shape:  # not the number of steps
                    of[name] = distribute_tensor(
                        value.to(params[i].device), params[i].device_mesh, params[i].placements
                    )
    optimizer.load_state_dict(state)


@torch.no_grad()
def finish_gradients(params, max_norm):
    """Average the gradients of what is whole everywhere, as the shares' already are; clip all together -> norm before clipping."""
    shares = [p.grad for p in params if isinstance(p.grad, DTensor)]
    rest = [p.grad for p in params if p.grad is not None and not isinstance(p.grad, DTensor)]
    for grad in rest:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    norms = [torch.nn.utils.get_total_norm(grads) for grads in (shares, rest) if grads]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack([norm.float() for norm in norms]).norm()
    scale = min(1.0, max_norm / (norm.item() + 1e-6))
    for grad in shares + rest:
        grad *= scale
    return norm
